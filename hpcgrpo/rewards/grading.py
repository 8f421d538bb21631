"""A pool of killable processes that judge whether answers are equal.

A hostile answer (`9^{9^9}`) holds the interpreter lock for as long as it likes, so only the kernel can stop
it: each process limits its own CPU time, wall time and memory per answer, and dies of it. A dead process
costs the outcome of the one pair it had, and is replaced by a fork of a *template* process, which has the
parser loaded.

The template is started with `subprocess`, not `multiprocessing`: `__main__` is never imported again, and
nothing of this process (torch, threads, CUDA) reaches it. Template and graders end when this process does,
however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Literal

from hpcgrpo.rewards.answers import MAX_LENGTH, settle, tidy
from hpcgrpo.rewards.numbers import decimal_value
from hpcgrpo.rewards.units import without_unit

Outcome = Literal["right", "wrong", "unparsed", "timeout", "error"]
Question = tuple[str, str, float | None]  # reference, prediction, tolerance
WALL_LIMIT_FACTOR = 10  # CPU time is the limit; wall time only catches a process that sleeps
ANSWERS_PER_PROCESS = 500  # then it is replaced, since the parser's caches grow
TICKS = 0.9  # of the limit: the kernel counts CPU time in ticks, so that it may be over a little early
MAX_RESTARTS = 2  # of the template in one call
START_SECONDS = 300.0  # to load the parser from a cold network file system

# who judges -> the module and function of (reference, prediction, tolerance) that does, in a grading process
JUDGES = {
    "hpcgrpo": ("hpcgrpo.rewards.equivalence", "equal"),
    "math-verify": ("hpcgrpo.rewards.formulas", "plain_math_verify"),
    "text": ("hpcgrpo.rewards.answers", "same_text"),
}

# ------------------------------------------------------------------------------------- in this process


@dataclass
class _Process:
    """A grading process as seen from here: its end of the line, and what it is busy with."""

    pid: int
    line: socket.socket
    pair: int | None = None
    since_seconds: float = 0.0
    answers: int = 0


class _TemplateDied(Exception):
    """The process that forks graders is gone, and with it all of them; their pairs are not to blame."""


class Grader:
    """Decides (reference, prediction) pairs; starts its processes when the first pair needs one.

    Plain numbers and equal texts are settled here and now, equal pairs once. Verdicts depend on the pair (and its
    tolerance) alone. `time_limit_seconds` is CPU time a pair, `memory_limit_bytes` the address space of one process;
    `judge` is a key of JUDGES.
    """

    def __init__(
        self,
        *,
        num_processes: int,
        time_limit_seconds: float = 2.0,
        memory_limit_bytes: int = 1 << 30,
        judge: str = "hpcgrpo",
    ) -> None:
        assert num_processes >= 1 and time_limit_seconds > 0 and judge in JUDGES
        self.judge = judge
        self.num_processes = num_processes
        self.time_limit_seconds = time_limit_seconds
        self.memory_limit_bytes = memory_limit_bytes
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._processes: list[_Process] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Grader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    def grade(
        self, pairs: Sequence[tuple[str, str]], tolerances: Sequence[float | None] | None = None
    ) -> list[Outcome]:
        """One outcome a (reference, prediction) pair: right, wrong, timeout or error. Where a tolerance is given for
        a pair, |prediction - reference| <= tolerance counts as right as well, of each number in a list or tuple.
        RuntimeError if no process can be started, ValueError for tolerances that are negative or of another number."""
        questions = _questions(pairs, tolerances)
        outcomes: dict[Question, Outcome] = {}
        open_questions: list[Question] = []
        for question in dict.fromkeys(questions):
            verdict = precheck(*question) if self.judge == "hpcgrpo" else None
            if verdict is None:
                open_questions.append(question)
            else:
                outcomes[question] = "right" if verdict else "wrong"
        with self._lock:
            outcomes.update(self._judge(open_questions))
        return [outcomes[question] for question in questions]

    def close(self) -> None:
        """Ends the processes. A later `grade` starts them again."""
        with self._lock:
            self._stop()

    def pids(self) -> list[int]:
        """The template's, then the graders'."""
        return [] if self._template is None else [self._template.pid, *(p.pid for p in self._processes)]

    def _judge(self, pairs: list[Question]) -> dict[Question, Outcome]:
        outcomes: dict[Question, Outcome] = {}
        waiting = deque(range(len(pairs)))
        restarts = 0
        try:
            while len(outcomes) < len(pairs):
                try:
                    self._hand_out(waiting, pairs)
                    for process in self._ready():
                        assert process.pair is not None
                        pair = pairs[process.pair]
                        outcomes[pair] = self._collect(process)
                except _TemplateDied:
                    restarts += 1
                    if restarts > MAX_RESTARTS:
                        raise RuntimeError(
                            "grading processes can't be forked or are killed from outside; "
                            "is the limit of processes or memory of this node or job reached?"
                        ) from None
                    waiting.extendleft(p.pair for p in self._processes if p.pair is not None)
                    self._stop()
        except BaseException:
            self._stop()  # what is in flight would answer the next call
            raise
        return outcomes

    def _hand_out(self, waiting: deque[int], pairs: list[Question]) -> None:
        wanted = min(self.num_processes, len(waiting) + sum(p.pair is not None for p in self._processes))
        while len(self._processes) < wanted:
            self._processes.append(self._fork())
        for process in list(self._processes):
            if not waiting:
                return
            if process.pair is None:
                now = time.monotonic()  # before the process can begin
                if not _send(process.line, pairs[waiting[0]]):  # died while idle; the pair is not to blame
                    self._retire(process)
                    return self._hand_out(waiting, pairs)
                process.pair, process.since_seconds = waiting.popleft(), now

    def _ready(self) -> list[_Process]:
        """Busy processes that answered or died; kills those that the kernel's limits did not."""
        busy = {p.line.fileno(): p for p in self._processes if p.pair is not None}
        poll = select.poll()
        for number in busy:
            poll.register(number, select.POLLIN)
        ready = [busy[number] for number, _ in poll.poll(1000)]
        if not ready:
            latest = time.monotonic() - (WALL_LIMIT_FACTOR + 1) * self.time_limit_seconds - 1
            ready = [p for p in busy.values() if p.since_seconds < latest]
            for process in ready:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        return ready

    def _collect(self, process: _Process) -> Outcome:
        with contextlib.suppress(OSError, ValueError):
            answer = process.line.recv(64).decode().strip()
            if answer in ("right", "wrong", "error"):
                process.pair, process.answers = None, process.answers + 1
                if answer == "error" or process.answers >= ANSWERS_PER_PROCESS:
                    self._retire(process)
                return answer  # type: ignore[return-value]
        if self._template is None or self._template.poll() is not None:
            raise _TemplateDied
        self._retire(process)
        took = time.monotonic() - process.since_seconds
        return "timeout" if took >= TICKS * self.time_limit_seconds else "error"

    def _retire(self, process: _Process) -> None:
        process.line.close()
        self._processes.remove(process)

    def _fork(self) -> _Process:
        """A new grading process; starts the template if there is none."""
        if self._control is None:
            self._start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"F"], [theirs.fileno()])
            ours.settimeout(START_SECONDS)
            pid = int(ours.recv(16))
            ours.settimeout(None)
        except (OSError, ValueError):
            ours.close()
            raise _TemplateDied from None
        return _Process(pid, ours)

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        limits = f"{self.time_limit_seconds!r}, {self.memory_limit_bytes!r}, {self.judge!r}"
        package = str(Path(__file__).parents[2])
        code = (
            f"import sys; sys.path.append({package!r}); from hpcgrpo.rewards.grading import run_template; "
            f"run_template({theirs.fileno()}, {limits})"
        )
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        self._control.settimeout(START_SECONDS)
        try:
            started = self._control.recv(1) == b"R"
        except OSError:
            started = False
        if not started:
            self._stop()
            raise RuntimeError(
                "the grading process did not start (its error stands above); "
                f"try: {sys.executable} -c 'import math_verify'"
            )

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()  # the template ends at this, the graders with it
        if self._template is not None:
            try:
                self._template.wait(5)
            except subprocess.TimeoutExpired:
                self._template.kill()
                self._template.wait()
        for process in self._processes:
            process.line.close()
        self._control, self._template, self._processes = None, None, []


def _questions(pairs: Sequence[tuple[str, str]], tolerances: Sequence[float | None] | None) -> list[Question]:
    if tolerances is None:
        return [(gold, prediction, None) for gold, prediction in pairs]
    if len(tolerances) != len(pairs):
        raise ValueError(
            f"{len(tolerances)} tolerances for {len(pairs)} pairs: give one (or None) for each pair"
        )
    wrong = [t for t in tolerances if t is not None and not 0 <= t < float("inf")]
    if wrong:
        raise ValueError(f"tolerance {wrong[0]!r}: must be a finite number of at least 0, or None")
    return [(*pair, tolerance) for pair, tolerance in zip(pairs, tolerances, strict=True)]


def precheck(gold: str, prediction: str, tolerance: float | None = None) -> bool | None:
    """The verdict where text and rational arithmetic give one; else None."""
    if len(prediction) > 4 * MAX_LENGTH or len(gold) > 4 * MAX_LENGTH:
        return gold.strip() == prediction.strip()
    gold, prediction = tidy(gold), tidy(prediction)
    verdict = settle(gold, prediction)
    if tolerance is None or verdict:
        return verdict
    values = [decimal_value(without_unit(text)) for text in (gold, prediction)]
    if values[0] is None or values[1] is None:
        return None if len(prediction) <= MAX_LENGTH and prediction else False
    return abs(values[0][0] - values[1][0]) <= Fraction(repr(tolerance))


def _send(line: socket.socket, pair: Question) -> bool:
    if select.select([line], [], [], 0)[0]:  # an idle process has nothing to say: this is its end
        return False
    try:
        line.sendall(json.dumps(pair).encode() + b"\n")
    except OSError:
        return False
    return True


# ---------------------------------------------------------------------- in the template and its children


def run_template(
    control_fd: int, time_limit_seconds: float, memory_limit_bytes: int, judge: str = "hpcgrpo"
) -> None:
    """Loads the parser once, then forks a grading process for each socket sent over the control socket."""
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
    ):
        signal.signal(number, signal.SIG_IGN)  # Slurm sends these to every process of a step
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from hpcgrpo.rewards import equivalence

    equivalence.warm_up()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=control_fd) as control:
        control.sendall(b"R")
        while True:
            message, lines, _, _ = socket.recv_fds(control, 1, 1)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            if not message:
                os._exit(0)  # nothing to tidy up, and faster
            if os.fork() == 0:
                control.close()
                try:
                    _run_grader(lines[0], time_limit_seconds, memory_limit_bytes, judge)
                finally:
                    os._exit(0)
            os.close(lines[0])


def _run_grader(
    line_fd: int, time_limit_seconds: float, memory_limit_bytes: int, judge: str = "hpcgrpo"
) -> None:
    """Answers pairs until the line closes. The kernel ends it at a limit, whatever Python is doing."""
    _die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory_limit_bytes if hard == resource.RLIM_INFINITY else min(memory_limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with socket.socket(fileno=line_fd) as line, line.makefile("r") as questions:
        line.sendall(str(os.getpid()).encode())
        for question in questions:
            signal.setitimer(signal.ITIMER_PROF, time_limit_seconds)
            signal.setitimer(signal.ITIMER_REAL, WALL_LIMIT_FACTOR * time_limit_seconds)
            gold, prediction, tolerance = json.loads(question)
            answer = _answer(gold, prediction, tolerance, judge)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            line.sendall(answer.encode())


def _answer(gold: str, prediction: str, tolerance: float | None = None, judge: str = "hpcgrpo") -> Outcome:
    module, function = JUDGES[judge]
    equal = getattr(importlib.import_module(module), function)
    try:
        return "right" if equal(gold, prediction, tolerance) else "wrong"
    except Exception:  # MemoryError, RecursionError and what the parser raises: this pair's outcome
        return "error"


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, Linux
