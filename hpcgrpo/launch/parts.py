"""The two parts that a node of a job can play: serving with vLLM engines, or learning with ranks under torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from hpcgrpo import ports
from hpcgrpo.attempt import Attempt
from hpcgrpo.launch import network, slurm
from hpcgrpo.launch.children import Child
from hpcgrpo.launch.local import newest_checkpoint
from hpcgrpo.launch.ranks import USER_ERROR
from hpcgrpo.launch.rendezvous import load_json, secret_file
from hpcgrpo.launch.serve import Engines, plans
from hpcgrpo.sections import RunConfig


@dataclass(frozen=True)
class End:
    """How this node's part ended."""

    code: int
    reason: str
    final: bool = False  # starting again would end the same way


class Part(Protocol):
    """What a node does."""

    def poll(self) -> End | None:
        """Look after its processes; not None once it has ended."""
        ...

    def news(self) -> dict[str, Any]:
        """What node 0 needs to know of it: `moved` in epoch seconds, notes of the ranks."""
        ...

    def hear(self, message: dict[str, Any]) -> None: ...

    def dump(self) -> None:
        """Have its processes write their stacks into their logs."""
        ...

    def kill(self) -> None: ...


@dataclass
class Serve:
    """A node of vLLM engines: the actor's, and the peer's where that samples too."""

    config: RunConfig
    where: slurm.Place
    attempt: Attempt
    address: str
    say: Any
    served: bool = False  # the engines were up once
    tokens: float = -1.0
    moved: float = 0.0
    states: dict[str, str] = field(default_factory=dict)  # by the engine's name
    fleets: list[Engines] = field(init=False)

    def __post_init__(self) -> None:
        served = plans(self.config)
        count = sum(plan.engines for plan in served)
        self.held = ports.take(count, f"{self.where.job}/engines", self.address)
        os.environ.update(child_environment(self.attempt, self.address, self.config))
        free = iter([held.port for held in self.held])
        self.fleets = [
            Engines(
                plan,
                address=self.address,
                ports=[next(free) for _ in range(plan.engines)],
                secret_file=secret_file(self.attempt.folder.parent),
                log_folder=self.attempt.folder,
                timeout_seconds=self.config.generation.vllm_server_timeout,
            )
            for plan in served
        ]
        for engines in self.fleets:
            engines.start()
        self.say(f"starting {count} vLLM engine{'s' * (count > 1)}")

    def poll(self) -> End | None:
        for engines in self.fleets:
            engines.poll()
        if not self.served and all(engines.ready for engines in self.fleets):
            self.served = True
            self.say(f"engines ready at {', '.join(url for engines in self.fleets for url in engines.urls)}")
        states = {f"{f.name} {e['index']}": e["state"] for f in self.fleets for e in f.describe()}
        if self.served and states != self.states:
            for name, state in states.items():
                if state != self.states.get(name, state):
                    self.say(f"{name} is {state}; its log is {name.replace(' ', '-')}.log")
        self.states = states
        return None

    def news(self) -> dict[str, Any]:
        counts = [engines.tokens_generated() for engines in self.fleets]
        tokens = sum(count or 0.0 for count in counts)
        if tokens != self.tokens or not self.served:  # starting has a limit of its own
            self.tokens, self.moved = tokens, time.time()
        ready = [
            {"url": url, "node": self.where.node, "index": i, "policy": engines.plan.policy}
            for engines in self.fleets
            for i, url in enumerate(engines.urls)
        ]
        return {"moved": self.moved, "engines": ready if self.served else []}

    def hear(self, message: dict[str, Any]) -> None:
        """Engines need nothing of the others."""

    def dump(self) -> None:
        """vLLM's own log says what it does."""

    def kill(self) -> None:
        for engines in self.fleets:
            engines.stop()


@dataclass
class Learn:
    """A node of learner ranks, under torchrun's agent."""

    config: RunConfig
    where: slurm.Place
    attempt: Attempt
    address: str
    say: Any
    agent: Child | None = None
    held: ports.Held | None = None
    master: str | None = None
    engines: list[dict[str, Any]] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    checkpoint: tuple[int, bool] = (0, False)

    def __post_init__(self) -> None:
        if self.where.node == self.config.cluster.vllm_nodes:  # the ranks' store lives here
            self.held = ports.take(1, f"{self.where.job}/master", self.address)[0]
            self.master = f"{self.address}:{self.held.port}"
            self._start()

    def _start(self) -> None:
        fd = self.held.bound.fileno() if self.held else None
        environment = child_environment(self.attempt, self.address, self.config)
        environment["HPCGRPO_MASTER"] = str(self.master)
        if fd is not None:
            environment["HPCGRPO_MASTER_FD"] = str(fd)
        command = [sys.executable, "-u", "-m", "hpcgrpo.cli", "ranks", str(self.attempt.folder.parent.parent)]
        log = self.attempt.folder / f"node-{self.where.node}.log"
        self.agent = Child(command, environment, log, pass_fds=[fd] if fd is not None else [])
        if self.held:
            self.held.release()  # the agent has it now, until it binds it
        self.say(
            f"starting {self.config.cluster.ranks_per_node} learner ranks; their store is at {self.master}"
        )

    def poll(self) -> End | None:
        code = self.agent.poll() if self.agent else None
        if code is None:
            return None
        return End(code, "its ranks ended" if code == 0 else self._failure(code), final=code == USER_ERROR)

    def _failure(self, code: int) -> str:
        """The first error that a rank of this node wrote, unless one was killed: that comes first."""
        failure = self.attempt.read("failure")
        if code > 128 and failure is None:
            return f"torchrun's agent was ended by signal {code - 128}"
        if failure is not None and failure["how"].startswith("signal"):
            return f"rank {failure['rank']} was ended by {failure['how']}"
        first = (self.where.node - self.config.cluster.vllm_nodes) * self.config.cluster.ranks_per_node
        mine = range(first, first + self.config.cluster.ranks_per_node)
        errors = [e for r in mine if (e := load_json(self.attempt.folder / f"rank-{r}.error.json"))]
        if not errors:
            return f"a rank ended with code {code}"
        said = min(errors, key=lambda e: float(e["time"]))
        return f"rank {said['rank']}: {said['type']}: {said['message']}"

    def news(self) -> dict[str, Any]:
        said: dict[str, Any] = {"moved": self.attempt.moved_at()}
        if self.master and self.held:
            said["master"] = self.master
        status = self.attempt.read("status")
        if status:  # rank 0 is on this node
            if status != self.status:  # a look at every file of the checkpoints, which need not be repeated
                self.status = status
                folder = self.attempt.folder.parent.parent
                self.checkpoint = newest_checkpoint(folder, self.config.train)
            said |= {"status": status, "checkpoint": list(self.checkpoint)}
        return said

    def hear(self, message: dict[str, Any]) -> None:
        if "master" in message and self.agent is None:
            self.master = message["master"]
            self._start()
        if "server" in message and message["server"]["engines"] != self.engines:
            self.engines = message["server"]["engines"]
            self.attempt.note("server", message["server"])

    def dump(self) -> None:
        for path in self.attempt.folder.glob(f"rank-*.pid-{self.where.node}"):
            with suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGQUIT)

    def kill(self) -> None:
        if self.agent is not None:
            self.agent.kill()
            for path in self.attempt.folder.glob(
                f"rank-*.pid-{self.where.node}"
            ):  # they die with their agent
                path.unlink(missing_ok=True)


def child_environment(attempt: Attempt, address: str, config: RunConfig) -> dict[str, str]:
    """What ranks and engines get: where they are, and the interface between the nodes."""
    environment = os.environ | {
        "HPCGRPO_ATTEMPT": str(attempt.folder),
        "HPCGRPO_NODE": str(attempt.node),
        "HPCGRPO_ADDRESS": address,
        "PYTHONUNBUFFERED": "1",
    }
    interface = config.cluster.interface or network.interface_of(address)
    if interface is not None:  # else gloo asks for the host name, which often leads to 127.0.1.1
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
        environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    return environment
