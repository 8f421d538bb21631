"""Node 0's watch over the whole job: who has ended, what the time limit leaves, whether anything still moves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hpcgrpo.attempt import Attempt
from hpcgrpo.journal import write_atomically
from hpcgrpo.launch import channel, slurm
from hpcgrpo.sections import RunConfig

Message = dict[str, Any]
ASK_LIMIT_SECONDS = 30.0  # between two looks at the job's time limit
LEASE_SECONDS = 5.0
GRACE_SECONDS = 60.0  # between the first rank that ended well and the last
DUMP_SECONDS = 3.0
ENDED_SECONDS = 120.0  # for Slurm to end a task of a job that is queued again
CODE_SAVED = 75  # ended before its end, to be gone on with
HOPELESS = 3  # starts in a row that got no further


@dataclass(frozen=True)
class Verdict:
    """How the attempt ends."""

    code: int
    reason: str
    again: bool  # back into the queue


@dataclass
class Lead:
    """What node 0 knows of all nodes, and decides."""

    config: RunConfig
    where: slurm.Place
    attempt: Attempt
    hub: channel.Hub
    server: Message
    say: Callable[[str], None]
    began: float = field(default_factory=time.time)
    ends: dict[int, Message] = field(default_factory=dict)
    engines: dict[int, list[Message]] = field(default_factory=dict)
    broadcasts: list[Message] = field(default_factory=list)
    told: dict[int, int] = field(default_factory=dict)  # how many broadcasts each node has got; ours included
    moved: float = field(default_factory=time.time)
    begun: bool = False  # something has moved already: imports and loading are over
    status: Message = field(default_factory=dict)
    checkpoint: tuple[int, bool] = (0, False)
    first_step: int | None = None
    stopping: Message | None = None
    dumped: float | None = None
    first_end: float | None = None
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        self.limit: float | None = None
        self._looked = 0.0
        self._next_lease = time.monotonic() + LEASE_SECONDS
        if self.where.slurm:
            threading.Thread(target=self._watch_limit, name="time limit", daemon=True).start()

    # ---- what the nodes say

    def hear(self, node: int, message: Message) -> None:
        """Take in one node's news."""
        moved = float(message.get("moved", 0))
        self.moved, self.begun = max(self.moved, moved), self.begun or moved > 0
        if "status" in message:
            self._note_status(message["status"], message["checkpoint"])
        if message.get("engines") and self.engines.get(node) != message["engines"]:
            self.engines[node] = message["engines"]
            self._announce_engines()
        if "master" in message and not any("master" in m for m in self.broadcasts):
            self.broadcasts.append({"master": message["master"]})
        if "stop" in message:
            self.stop(message["stop"], message["urgent"])
        if "ended" in message and node not in self.ends:
            self.ends[node] = message["ended"]

    def _note_status(self, status: Message, checkpoint: Any) -> None:
        self.status, self.checkpoint = status, (int(checkpoint[0]), bool(checkpoint[1]))
        if self.first_step is None:
            self.first_step = int(status["first_step"])

    def _announce_engines(self) -> None:
        if len(self.engines) == self.config.cluster.vllm_nodes:
            engines = [e for node in sorted(self.engines) for e in self.engines[node]]
            self.server = self.server | {"engines": engines}
            write_atomically(self.attempt.folder / "server.json", json.dumps(self.server, indent=1))
            self.broadcasts.append({"server": self.server})

    def stop(self, reason: str, urgent: bool) -> None:
        """Have every rank save and end."""
        if self.stopping is None or (urgent and not self.stopping["urgent"]):
            self.stopping = {"stop": reason, "urgent": urgent}
            self.broadcasts.append(self.stopping)

    # ---- one look

    def poll(self) -> Iterator[Message]:
        """Look at everything once -> what node 0 itself is to obey."""
        for node, line in list(self.hub.lines.items()):
            for message in line.messages():
                self.hear(node, message)
            if line.closed and node not in self.ends:
                self.ends[node] = {"code": 1, "reason": f"{line.peer} was lost", "final": False}
            for message in self.broadcasts[self.told.get(node, 0) :]:
                line.send(message)
            self.told[node] = len(self.broadcasts)
        self._watch_time()
        self._watch_idle()
        self._watch_nodes()
        self._watch_lease()
        self._decide()
        own = self.broadcasts[self.told.get(0, 0) :]
        self.told[0] = len(self.broadcasts)
        yield from own

    def _watch_limit(self) -> None:
        """In a thread of its own: a controller that is down must not hold up the rest."""
        while self.verdict is None:
            with suppress(OSError):
                self.limit = slurm.end_time(self.where.job)
            time.sleep(ASK_LIMIT_SECONDS)

    def _watch_time(self) -> None:
        limit = self.limit
        if limit is None:
            return
        left = limit - time.time()
        whole = limit - self.began
        save = float(self.status.get("save_seconds") or min(60.0, 0.05 * whole))
        if left < min(5.0, 0.05 * whole):  # too late to save, but not to be started again
            self._conclude(CODE_SAVED, "the time limit came before the ranks could stop", again=True)
        elif left < 2 * save + min(10.0, 0.1 * whole):
            self._stop_for_time(left, urgent=True)
        elif left < 1.2 * float(self.status.get("step_seconds", 0)) + 2 * save + min(15.0, 0.15 * whole):
            self._stop_for_time(left, urgent=False)

    def _stop_for_time(self, left: float, *, urgent: bool) -> None:
        if self.stopping is None or (urgent and not self.stopping["urgent"]):
            when = "now" if urgent else "at the end of the step"
            self.say(f"{left:.0f} s are left of the job's time limit: saving {when}")
            self.stop("time limit", urgent)

    def _watch_idle(self) -> None:
        still, cluster = time.time() - self.moved, self.config.cluster
        patience = 60 * cluster.idle_timeout_min
        if not self.begun:
            patience = max(patience, 2 * cluster.rendezvous_timeout)
        if self.dumped is None and still > patience:
            self.say(f"nothing has moved on any node for {still / 60:.1f} min; stacks go to the ranks' logs")
            self.dumped = time.monotonic()
            self.broadcasts.append({"dump": True})
        if self.dumped is not None and time.monotonic() - self.dumped > DUMP_SECONDS:
            again = cluster.idle_action == "requeue"
            self._conclude(1, f"idle for {still / 60:.1f} min (cluster.idle_timeout_min)", again=again)

    def _watch_nodes(self) -> None:
        missing = [
            h for i, h in enumerate(self.where.hosts) if i and i not in self.hub.lines and i not in self.ends
        ]
        late = time.time() - self.began > self.config.cluster.rendezvous_timeout
        if missing and late:
            hops = "; ".join(dict.fromkeys(self.hub.refused)) or "they never connected: see their logs"
            self._conclude(1, f"no line to {', '.join(missing)} ({hops})", again=True)

    def _watch_lease(self) -> None:
        if time.monotonic() > self._next_lease:
            self._next_lease = time.monotonic() + LEASE_SECONDS
            if not self.attempt.holds_lease():
                self._conclude(1, "another start has taken this run over", again=False)

    # ---- the end

    def _decide(self) -> None:
        bad = {n: e for n, e in self.ends.items() if e["code"]}
        if bad:
            node, end = next(iter(bad.items()))
            reason = f"{self.where.hosts[node]}: {end['reason']}"
            if self.stopping is not None and self.stopping["urgent"]:
                reason = f"{self.stopping['stop']} ({reason})"
            self._conclude(int(end["code"]), reason, again=not end.get("final"))
        elif self.ends:
            self.first_end = self.first_end or time.monotonic()
            learners = self.config.cluster.learn_nodes
            if len(self.ends) == learners or time.monotonic() - self.first_end > GRACE_SECONDS:
                finished = self.checkpoint[1] or self.stopping is None
                stop = self.stopping["stop"] if self.stopping else ""
                self._conclude(
                    0 if finished else CODE_SAVED,
                    "finished" if finished else f"saved: {stop}",
                    again=not finished,
                )

    def _conclude(self, code: int, reason: str, *, again: bool) -> None:
        if self.verdict is None:
            self.verdict = Verdict(code, reason, again and self.where.slurm)

    def finish(self) -> int:
        """Tell every node, write ended.json, put the job back into the queue where that helps -> exit code."""
        assert self.verdict is not None
        self.hub.send({"end": self.verdict.code, "reason": self.verdict.reason})
        refusal = self._why_not_again() if self.verdict.again else None
        requeued = False
        if self.verdict.again and refusal is None:
            self.say(f"{self.verdict.reason}; back into the queue")
            self._write_ended(requeued=True)
            try:
                slurm.requeue(self.where.job, self.where.restart)
                requeued = True
            except OSError as error:
                refusal = f"Slurm does not requeue it ({error}); submit again to resume"
        if requeued:
            deadline = time.monotonic() + ENDED_SECONDS
            while time.monotonic() < deadline and self.attempt.holds_lease():
                time.sleep(1)  # Slurm ends this task, unless it takes this node for dead
            return self.verdict.code
        if refusal:
            self.verdict = Verdict(self.verdict.code, f"{self.verdict.reason}; {refusal}", again=False)
        self.say(self.verdict.reason)
        self._write_ended(requeued=False)
        return self.verdict.code

    def _why_not_again(self) -> str | None:
        assert self.verdict is not None
        if self.stopping is not None and self.stopping["stop"] == "SIGTERM":
            with suppress(OSError):
                if "CANCELLED" in slurm.state(self.where.job):
                    return "cancelled; submit again to resume"
        if self.where.restart >= self.config.cluster.max_requeues:
            return f"started {self.where.restart + 1} times (cluster.max_requeues); submit again to resume"
        if self._hopeless():
            return (
                f"{HOPELESS} starts in a row got no further than step {self.checkpoint[0]}; hpcgrpo doctor says why."
                " Mend it, or raise cluster.timeout_min if it is the time limit, and submit again"
            )
        return None

    def _hopeless(self) -> bool:
        """Whether the last starts of this job, this one included, all ended where they began."""
        ends = [self._entry(requeued=True)]
        for restart in range(self.where.restart - 1, -1, -1):
            path = self.attempt.folder.with_name(f"{self.where.job}.{restart}") / "ended.json"
            with suppress(OSError, ValueError):
                ends.append(json.loads(path.read_text()))
        last = ends[:HOPELESS]
        stuck = [e["last_step"] <= e["first_step"] and "SIGTERM" not in e["reason"] for e in last]
        return len(last) == HOPELESS and all(stuck)

    def _entry(self, *, requeued: bool) -> Message:
        assert self.verdict is not None
        return {
            "job": self.where.job,
            "attempt": self.where.attempt,
            "code": self.verdict.code,
            "reason": self.verdict.reason,
            "requeued": requeued,
            "began": self.began,
            "ended": time.time(),
            "first_step": self.first_step or 0,
            "last_step": self.checkpoint[0],
        }

    def _write_ended(self, *, requeued: bool) -> None:
        text = json.dumps(self._entry(requeued=requeued), indent=1)
        with suppress(OSError):
            write_atomically(self.attempt.folder / "ended.json", text)
            if not requeued and self.attempt.holds_lease():
                write_atomically(self.attempt.folder.parent / "ended.json", text)
