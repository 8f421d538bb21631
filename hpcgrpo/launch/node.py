"""What one node of a job runs: it serves or it learns. The first process that ends decides for all nodes.

Node 0 leads: it takes the lines of the other nodes, watches time limit, idleness and lease, and says what happens
at the end: finished, failed, or back into the queue.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgrpo import ports
from hpcgrpo.attempt import Attempt
from hpcgrpo.config import load
from hpcgrpo.journal import write_atomically
from hpcgrpo.launch import channel, network, slurm
from hpcgrpo.launch.children import block_signals, next_signal, without_slurm
from hpcgrpo.launch.lead import Lead
from hpcgrpo.launch.parts import End, Learn, Part, Serve
from hpcgrpo.launch.ranks import CONFIG_FILE, USER_ERROR
from hpcgrpo.launch.rendezvous import await_server, run_secret
from hpcgrpo.launch.serve import EngineError
from hpcgrpo.sections import RunConfig

LOOP_SECONDS = 0.2
REPORT_SECONDS = 2.0
URGENT_SECONDS = 25.0  # from a TERM to the end of what has not ended: Slurm kills after 30 by default
CODE_FAILED = 1


def task(folder: str) -> None:
    """`main` for launchers that know no exit codes: leaves with it."""
    sys.exit(main(folder))


def main(folder: str) -> int:
    """Run this node's part of the run in `folder` to its end -> the exit code of what decided."""
    block_signals()
    signal.signal(signal.SIGCONT, signal.SIG_DFL)  # submitit's handler tells of each
    where = slurm.place(os.environ)
    for name in set(os.environ) - set(without_slurm(os.environ)):
        del os.environ[name]  # nothing that is started here is a step of the job
    run_folder = Path(folder)
    config = load(run_folder / CONFIG_FILE)
    attempt = Attempt(run_folder / "slurm" / where.attempt, where.node)
    attempt.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    share_gpus(config, where)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    node = Node(config, where, attempt)
    if where.node == 0 and not attempt.take_lease():
        node.say("a later start of this job has taken the run over; nothing to do here")
        return 0
    try:
        return node.run()
    except Exception as error:
        node.say(f"{type(error).__name__}: {error}")
        attempt.note("node-error", {"time": time.time(), "type": type(error).__name__, "message": str(error)})
        if isinstance(error, ValueError):
            return USER_ERROR
        raise
    finally:
        node.close()


def share_gpus(config: RunConfig, where: slurm.Place) -> None:
    """Nodes that are processes of one machine: each gets its share of the GPUs."""
    count = config.cluster.gpus_per_node
    if not where.slurm and len(where.hosts) > 1 and count:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = seen.split(",") if seen else [str(i) for i in range(count * len(where.hosts))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible[count * where.node : count * (where.node + 1)])


@dataclass
class Node:
    """This node: its part, and its line to node 0 or, on node 0, the lead."""

    config: RunConfig
    where: slurm.Place
    attempt: Attempt
    part: Part | None = None
    line: channel.Line | None = None
    lead: Lead | None = None
    urgent_since: float | None = None
    end: End | None = None  # of this node's part
    reported: float = 0.0

    @property
    def name(self) -> str:
        host = self.where.hosts[self.where.node]
        return host if len(set(self.where.hosts)) == len(self.where.hosts) else f"node {self.where.node}"

    def say(self, text: str) -> None:
        """One line to the job's log and to this node's."""
        said = f"{time.strftime('%H:%M:%S')} [{self.name}] {text}"
        with suppress(OSError):
            print(said, flush=True)
        with suppress(OSError), (self.attempt.folder / f"node-{self.where.node}.log").open("a") as file:
            file.write(said + "\n")

    def run(self) -> int:
        """Find the other nodes, start the part, and stay until node 0 says that it is over."""
        others = [h for i, h in enumerate(self.where.hosts) if i != self.where.node and h != "localhost"]
        peers = others[:1] if self.where.node == 0 else [self.where.hosts[0]]
        address = network.own_address(self.config.cluster.interface, [p for p in peers if p != "localhost"])
        secret = run_secret(self.attempt.folder.parent, create=self.where.node == 0)
        self._meet(address, secret)
        serves = self.where.node < self.config.cluster.vllm_nodes
        made: type[Serve] | type[Learn] = Serve if serves else Learn
        self.part = made(self.config, self.where, self.attempt, address, self.say)
        while True:
            caught = next_signal(LOOP_SECONDS)
            if caught is not None:
                self._on_signal(caught)
            if self.end is None:
                self.end = self._polled()
            self._report()
            code = self._lead_on() if self.lead else self._follow()
            if code is not None:
                return code

    def _meet(self, address: str, secret: str) -> None:
        deadline = time.monotonic() + self.config.cluster.rendezvous_timeout
        folder = self.attempt.folder
        if self.where.node == 0:
            held = ports.take(1, f"{self.where.job}/hub", address)[0]
            hub = channel.Hub(held, address=address, secret=secret, name=self.name)
            about: dict[str, Any] = {
                "attempt": self.where.attempt,
                "pid": os.getpid(),
                "host": socket.gethostname(),
            }
            about |= {"address": address, "control_port": hub.port, "engines": []}
            write_atomically(folder / "server.json", json.dumps(about, indent=1))
            self.lead = Lead(self.config, self.where, self.attempt, hub, about, self.say)
            return
        about = await_server(folder, self.where.attempt, deadline)
        self.line = channel.connect(
            about["address"],
            about["control_port"],
            node=self.where.node,
            name=self.name,
            own=address,
            secret=secret,
            deadline=deadline,
        )

    def _polled(self) -> End | None:
        assert self.part is not None
        try:
            end = self.part.poll()
        except EngineError as error:
            end = End(CODE_FAILED, str(error), final=not getattr(self.part, "served", False))
        late = self.urgent_since is not None and time.monotonic() - self.urgent_since > URGENT_SECONDS
        if end is None and late:
            end = End(128 + signal.SIGTERM, "did not end within the time that a TERM leaves")
        if end is not None:
            self.say(f"ended with code {end.code}: {end.reason}")
        return end

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        urgent = number == signal.SIGTERM
        self.say(f"{name}: " + ("saving and ending now" if urgent else "saving at the end of the step"))
        self._stop(name, urgent)
        if self.line is not None:
            self.line.send({"stop": name, "urgent": urgent})

    def _stop(self, reason: str, urgent: bool) -> None:
        self.attempt.request_stop(reason, urgent=urgent)
        if urgent and self.urgent_since is None:
            self.urgent_since = time.monotonic()
        if self.lead is not None:
            self.lead.stop(reason, urgent)

    def _report(self) -> None:
        """Tell node 0 what has changed here."""
        assert self.part is not None
        if self.end is not None or time.monotonic() - self.reported > REPORT_SECONDS:
            self.reported = time.monotonic()
            news = self.part.news()
            if self.end is not None:
                news["ended"] = {"code": self.end.code, "reason": self.end.reason, "final": self.end.final}
            if self.lead is not None:
                self.lead.hear(0, news)
            elif self.line is not None:
                self.line.send(news)

    def _lead_on(self) -> int | None:
        assert self.lead is not None and self.part is not None
        for message in self.lead.poll():
            self._obey(message)
        if self.lead.verdict is None:
            return None
        self.part.kill()
        return self.lead.finish()

    def _follow(self) -> int | None:
        assert self.line is not None and self.part is not None
        for message in self.line.messages():
            if "end" in message:
                self.part.kill()
                self.say(f"node 0 says: {message['reason']}")
                self._await_node_0()
                return self.end.code if self.end is not None and self.end.code else int(message["end"])
            self._obey(message)
        if self.line.closed:
            self.say("node 0 is gone")
            self._stand_in()
            self.part.kill()
            return CODE_FAILED
        return None

    def _stand_in(self) -> None:
        """Node 0's launcher was lost, not its node: the next one puts the job back into the queue."""
        again = self.where.slurm and self.where.node == 1
        if not again or self.where.restart >= self.config.cluster.max_requeues:
            return
        try:
            if slurm.state(self.where.job) == "RUNNING":
                slurm.requeue(self.where.job, self.where.restart, patience_seconds=2)
        except OSError as error:
            self.say(f"Slurm does not requeue the job ({error}); submit again to resume")

    def _obey(self, message: dict[str, Any]) -> None:
        assert self.part is not None
        if "stop" in message:
            self._stop(message["stop"], message["urgent"])
        elif "dump" in message:
            self.part.dump()
        else:
            self.part.hear(message)

    def _await_node_0(self) -> None:
        """A task that ends badly ends the whole step, so node 0 goes first: it may have to requeue the job."""
        deadline = time.monotonic() + 150
        while self.line is not None and not self.line.closed and time.monotonic() < deadline:
            next_signal(LOOP_SECONDS)

    def close(self) -> None:
        """Nothing that this node started stays."""
        if self.part is not None:
            self.part.kill()
        if self.lead is not None:
            self.lead.hub.close()
        if self.line is not None:
            self.line.close()
