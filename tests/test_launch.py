"""The parts of a job's launcher that need no Slurm: the line between nodes, stop flags, the lease, decisions."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo import checkpoint_folder, ports
from hpcgrpo.attempt import Attempt
from hpcgrpo.config import ConfigError
from hpcgrpo.launch import channel, children, network, slurm
from hpcgrpo.launch.lead import HOPELESS, Lead
from hpcgrpo.launch.local import newest_checkpoint
from hpcgrpo.launch.rendezvous import await_server, run_secret
from hpcgrpo.sections import ClusterConfig, TrainConfig

LOCAL = "127.0.0.1"


def hub(secret: str = "s") -> channel.Hub:
    return channel.Hub(ports.take(1, "test", LOCAL)[0], address=LOCAL, secret=secret, name="node0")


def join(to: channel.Hub, node: int = 1, *, secret: str = "s", seconds: float = 5) -> channel.Line:
    return channel.connect(
        LOCAL,
        to.port,
        node=node,
        name=f"node{node}",
        own=LOCAL,
        secret=secret,
        deadline=time.monotonic() + seconds,
    )


def until(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


# ---- the line


def test_messages_go_both_ways_and_a_lost_side_is_seen() -> None:
    center = hub()
    line = join(center)
    until(lambda: 1 in center.lines)
    line.send({"moved": 1.5})
    center.send({"stop": "TERM", "urgent": True})
    got: list[Any] = []
    until(lambda: got.extend(center.lines[1].messages()) or got)
    assert got == [{"moved": 1.5}]
    heard: list[Any] = []
    until(lambda: heard.extend(line.messages()) or heard)
    assert heard == [{"stop": "TERM", "urgent": True}]
    line.close()
    until(lambda: center.lines[1].closed)
    center.close()


def test_another_secret_gets_no_line() -> None:
    center = hub()
    with pytest.raises(channel.HopError, match="secret"):
        join(center, secret="other", seconds=0.1)
    assert not center.lines
    center.close()


def test_a_node_that_cannot_be_reached_is_told_which_hop_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(address: str, port: int) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(channel, "probe", unreachable)  # as a firewall before the other node's ports would
    center = hub()
    with pytest.raises(
        channel.HopError, match=r"node0 \(127.0.0.1\) cannot reach node1 at 127.0.0.1, port \d+"
    ):
        join(center, seconds=0.1)
    assert center.refused
    center.close()


def test_no_hub_is_the_other_hop() -> None:
    with pytest.raises(
        channel.HopError, match=r"node2 \(127.0.0.1\) cannot reach node 0 at 127.0.0.1, port 9:"
    ):
        channel.connect(
            LOCAL, 9, node=2, name="node2", own=LOCAL, secret="s", deadline=time.monotonic() + 0.1
        )


def test_garbage_on_the_hub_is_survived() -> None:
    center = hub()
    for said in (b"GET / HTTP/1.0\r\n\r\n", b"[]\n", b'{"secret": "s"}\n', b"\xff\xfe\n"):
        with socket.create_connection((LOCAL, center.port)) as other:
            other.sendall(said)
    line = join(center)
    until(lambda: 1 in center.lines)
    line.close()
    center.close()


# ---- addresses


def test_a_named_interface_must_have_an_address() -> None:
    assert network.own_address("lo", []) == LOCAL
    assert network.interface_of(LOCAL) == "lo"
    with pytest.raises(ConfigError, match=r"cluster.interface ib7: .* no such interface.*lo"):
        network.own_address("ib7", [])
    assert network.own_address(None, []) == LOCAL


def test_the_address_is_the_one_a_peer_is_reached_from() -> None:
    assert network.own_address(None, ["127.0.0.2"]) == LOCAL
    with pytest.raises(ConfigError, match=r"no address for no-such-host.invalid; set cluster.interface"):
        network.own_address(None, ["no-such-host.invalid"])


# ---- the attempt


def attempt(tmp_path: Path, name: str = "7.0", node: int = 1) -> Attempt:
    folder = tmp_path / "slurm" / name
    folder.mkdir(parents=True, exist_ok=True)
    return Attempt(folder, node)


def test_a_stop_may_become_urgent_but_never_less_so(tmp_path: Path) -> None:
    one = attempt(tmp_path)
    assert one.stop_request() is None and not one.urgent()
    one.request_stop("time limit", urgent=False)
    assert one.stop_request() == {"reason": "time limit", "urgent": False} and not one.urgent()
    one.request_stop("SIGTERM", urgent=True)
    one.request_stop("USR1", urgent=False)
    assert one.stop_request() == {"reason": "SIGTERM", "urgent": True} and one.urgent()
    assert attempt(tmp_path, node=2).stop_request() is None  # each node has its own flag


def test_the_lease_goes_to_the_later_start_of_a_job(tmp_path: Path) -> None:
    first, second, other = attempt(tmp_path, "7.0"), attempt(tmp_path, "7.1"), attempt(tmp_path, "8.0")
    assert first.take_lease() and first.holds_lease()
    assert second.take_lease() and second.holds_lease()
    assert not first.holds_lease()
    assert not first.take_lease()  # an old copy that wakes up
    assert other.take_lease() and not second.holds_lease()


def test_movement_is_noted_at_most_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, now = attempt(tmp_path), [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert one.moved_at() == 0
    began = time.time()
    one.beat()
    assert began - 1 <= one.moved_at() <= time.time() + 1
    os.utime(one.folder / "beat-1", (7, 7))
    now[0] += 0.9
    one.beat()
    assert one.moved_at() == 7
    now[0] += 0.1
    one.beat()
    assert one.moved_at() >= began - 1


# ---- rendezvous


def test_a_server_file_of_another_attempt_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text(json.dumps({"attempt": "7.0", "address": "10.0.0.1"}))
    with pytest.raises(channel.HopError, match="did not write"):
        await_server(tmp_path, "7.1", time.monotonic() + 0.3)
    fresh = {"attempt": "7.1", "address": "10.0.0.2"}
    threading.Timer(0.3, lambda: (tmp_path / "server.json").write_text(json.dumps(fresh))).start()
    assert await_server(tmp_path, "7.1", time.monotonic() + 60) == fresh


def test_the_secret_is_made_once_and_is_private(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="secret cannot be read"):
        run_secret(tmp_path, create=False, patience_seconds=0.1)
    secret = run_secret(tmp_path, create=True)
    assert len(secret) == 64
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert run_secret(tmp_path, create=False) == run_secret(tmp_path, create=True) == secret


# ---- where a process stands


def test_the_place_follows_from_slurms_variables() -> None:
    said = {"SLURM_JOB_ID": "12", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "a,b"}
    assert slurm.place(said) == slurm.Place("12", 0, 1, ("a", "b"), slurm=True)
    assert slurm.place(said | {"SLURM_RESTART_COUNT": "3"}).attempt == "12.3"
    local = {
        "SUBMITIT_LOCAL_JOB_ID": "99",
        "SUBMITIT_LOCAL_GLOBALID": "2",
        "SUBMITIT_LOCAL_NTASKS": "3",
    }
    assert slurm.place(local) == slurm.Place("local99", 0, 2, ("localhost",) * 3, slurm=False)
    assert len(slurm.place({}).hosts) == 1


def test_slurms_variables_do_not_reach_children() -> None:
    given = {"SLURM_NODEID": "1", "SLURM_CONF": "c", "PMI_RANK": "0", "SUBMITIT_EXECUTOR": "x", "PATH": "p"}
    assert children.without_slurm(given) == {"SLURM_CONF": "c", "PATH": "p"}


def test_signals_are_kept_from_children_and_given_to_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "node.py"
    script.write_text(
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from hpcgrpo.launch import children\n"
        "children.block_signals()\n"
        "child = children.Child([sys.executable, '-c', 'import time; time.sleep(600)'], os.environ, Path('log'))\n"
        "print(child.process.pid, flush=True)\n"
        "while (n := children.next_signal(5)) is None: pass\n"
        "time.sleep(0.3)\n"
        "print(n, child.poll(), flush=True)\n"
        "child.kill()\n"
        "print(child.poll(), flush=True)\n"
    )
    node = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert node.stdout is not None
    child = int(node.stdout.readline())
    time.sleep(0.5)
    for process in (child, node.pid):  # as Slurm does: every process of the step
        os.kill(process, signal.SIGUSR1)
    assert node.stdout.readline().split() == [str(int(signal.SIGUSR1)), "None"]
    assert node.stdout.readline().split() == [str(128 + signal.SIGKILL)]
    assert node.wait() == 0


# ---- what node 0 decides


class Config:
    def __init__(self, **cluster: Any) -> None:
        self.cluster = ClusterConfig(**{"nodes": 3, "vllm_nodes": 1, **cluster})


def lead(tmp_path: Path, restart: int = 0, **cluster: Any) -> Lead:
    place = slurm.Place("7", restart, 0, ("n0", "n1", "n2"), slurm=False)
    one = attempt(tmp_path, place.attempt, node=0)
    made = Lead(Config(**cluster), place, one, hub(), {"engines": []}, lambda text: None)  # type: ignore[arg-type]
    made.where = slurm.Place("7", restart, 0, place.hosts, slurm=True)  # no thread that asks Slurm
    return made


def ended(code: int = 0, reason: str = "its ranks ended", final: bool = False) -> dict[str, Any]:
    return {"ended": {"code": code, "reason": reason, "final": final}}


def looked(one: Lead) -> Any:
    list(one.poll())
    return one.verdict and (one.verdict.code, one.verdict.again)


def test_all_learner_nodes_have_to_end_well(tmp_path: Path) -> None:
    one = lead(tmp_path)
    one.hear(1, ended())
    assert looked(one) is None
    one.hear(2, ended())
    assert looked(one) == (0, False)
    assert one.verdict is not None and one.verdict.reason == "finished"


def test_the_first_failure_decides_and_goes_back_into_the_queue(tmp_path: Path) -> None:
    one = lead(tmp_path)
    one.hear(2, ended(137, "a rank was ended by signal 9"))
    one.hear(1, ended(1))
    assert looked(one) == (137, True)
    assert one.verdict is not None and one.verdict.reason == "n2: a rank was ended by signal 9"


def test_what_a_user_has_to_mend_is_final(tmp_path: Path) -> None:
    one = lead(tmp_path)
    one.hear(1, ended(2, "ConfigError", final=True))
    assert looked(one) == (2, False)


def test_a_stop_that_was_asked_for_is_no_end_of_the_run(tmp_path: Path) -> None:
    one = lead(tmp_path)
    one.stop("time limit", urgent=False)
    assert list(one.poll()) == [{"stop": "time limit", "urgent": False}]
    one.hear(1, ended())
    one.hear(2, ended())
    assert looked(one) == (75, True)
    done = lead(tmp_path / "b")
    done.stop("time limit", urgent=False)
    status = {"first_step": 3, "step": 5}
    done.hear(1, {"status": status, "checkpoint": [5, True], "moved": 0} | ended())
    done.hear(2, ended())
    assert looked(done) == (0, False)  # it was the last step anyway


def test_the_time_limit_leaves_room_for_a_step_and_two_saves(tmp_path: Path) -> None:
    one = lead(tmp_path, rendezvous_timeout=5000)
    one.began = time.time() - 1000
    status = {"first_step": 0, "step": 5, "step_seconds": 1000.0, "save_seconds": 200.0}
    one.hear(1, {"status": status, "checkpoint": [5, False]})
    one.limit = time.time() + 1655  # 1.2 * 1000 + 2 * 200 + 15 = 1615
    list(one.poll())
    assert one.stopping is None
    one.limit = time.time() + 1614
    assert list(one.poll()) == [{"stop": "time limit", "urgent": False}]
    one.limit = time.time() + 450  # 2 * 200 + 10 = 410
    assert list(one.poll()) == []
    one.limit = time.time() + 409
    assert list(one.poll()) == [{"stop": "time limit", "urgent": True}]
    assert looked(one) is None
    one.limit = time.time() + 4
    assert looked(one) == (75, True)


def test_a_job_in_which_nothing_moves_is_dumped_then_ended(tmp_path: Path) -> None:
    for action, again in (("requeue", True), ("fail", False)):
        one = lead(tmp_path / action, idle_timeout_min=5, idle_action=action)
        assert looked(one) is None
        one.hear(1, {"moved": time.time() - 400})
        one.moved = time.time() - 301
        assert list(one.poll()) == [{"dump": True}]
        one.dumped = time.monotonic() - 60
        assert looked(one) == (1, again)
        assert one.verdict is not None and "idle" in one.verdict.reason


def test_loading_may_take_longer_than_idleness(tmp_path: Path) -> None:
    one = lead(tmp_path, idle_timeout_min=0.02, rendezvous_timeout=100)
    one.moved = time.time() - 150
    assert looked(one) is None and one.dumped is None
    one.moved = time.time() - 210
    assert list(one.poll()) == [{"dump": True}]


def test_nodes_that_never_come_are_named(tmp_path: Path) -> None:
    one = lead(tmp_path, rendezvous_timeout=10)
    assert looked(one) is None
    one.began = time.time() - 11
    one.hub.refused.append("n0 cannot reach n1")
    assert looked(one) == (1, True)
    assert one.verdict is not None and "no line to n1, n2 (n0 cannot reach n1)" in one.verdict.reason


def test_an_attempt_without_the_lease_ends_for_good(tmp_path: Path) -> None:
    one = lead(tmp_path)
    one.attempt.take_lease()
    attempt(tmp_path, "7.1").take_lease()
    one._next_lease = 0
    assert looked(one) == (1, False)


def test_starts_that_get_no_further_are_not_repeated_for_ever(tmp_path: Path) -> None:
    for restart in range(HOPELESS):
        one = lead(tmp_path, restart)
        one.hear(1, {"status": {"first_step": 4, "step": 4}, "checkpoint": [4, False]} | ended(137, "killed"))
        assert looked(one) == (137, True)
        refusal = one._why_not_again()
        if restart < HOPELESS - 1:
            assert refusal is None
            one._write_ended(requeued=True)
    assert refusal is not None and "3 starts in a row got no further than step 4" in refusal
    lucky = lead(tmp_path, HOPELESS - 1)
    lucky.hear(1, {"status": {"first_step": 4, "step": 5}, "checkpoint": [5, False]} | ended(137, "killed"))
    assert looked(lucky) == (137, True)
    assert lucky._why_not_again() is None


def test_max_requeues_counts_the_starts_after_the_first(tmp_path: Path) -> None:
    one = lead(tmp_path, restart=2, max_requeues=2)
    one.hear(1, ended(137))
    looked(one)
    assert "cluster.max_requeues" in str(one._why_not_again())


def test_engines_are_announced_once_all_serving_nodes_have_theirs(tmp_path: Path) -> None:
    one = lead(tmp_path, vllm_nodes=2)
    first, second = {"url": "http://a:1", "node": 0, "index": 0}, {"url": "http://b:1", "node": 1, "index": 0}
    one.hear(1, {"engines": [second], "moved": 0})
    assert list(one.poll()) == []
    one.hear(0, {"engines": [first], "moved": 0})
    assert list(one.poll()) == [{"server": {"engines": [first, second]}}]
    assert json.loads((one.attempt.folder / "server.json").read_text())["engines"] == [first, second]


# ---- what is finished


def test_a_run_that_was_made_longer_is_not_finished_by_its_old_end(tmp_path: Path) -> None:
    """Killed before the first save of its new length, its newest checkpoint is still the old run's last one."""
    folder = tmp_path / "checkpoints" / "checkpoint-2"
    folder.mkdir(parents=True)
    state = {"progress": {"step": 2}, "finished": True, "length": [2, 1.0]}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    assert newest_checkpoint(tmp_path, TrainConfig(max_steps=2)) == (0, False)  # not marked as complete
    size = (folder / "trainer_state.json").stat().st_size
    (folder / "COMPLETE").write_text(json.dumps({"trainer_state.json": size}))
    assert newest_checkpoint(tmp_path, TrainConfig(max_steps=2)) == (2, True)
    assert newest_checkpoint(tmp_path, TrainConfig(max_steps=3)) == (2, False)
    assert newest_checkpoint(tmp_path, TrainConfig(num_train_epochs=2)) == (2, False)


def test_a_checkpoint_with_a_file_cut_short_does_not_count(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        state = json.dumps({"progress": {"step": step}, "finished": True})
        (folder / "trainer_state.json").write_text(state)
        (folder / "COMPLETE").write_text(json.dumps({"trainer_state.json": len(state)}))
    assert newest_checkpoint(tmp_path, TrainConfig(max_steps=4))[0] == 10
    assert checkpoint_folder.damaged(tmp_path / "checkpoints") == []
    (tmp_path / "checkpoints" / "checkpoint-10" / "trainer_state.json").write_text("{")
    assert newest_checkpoint(tmp_path, TrainConfig(max_steps=4))[0] == 4
    assert [p.name for p in checkpoint_folder.damaged(tmp_path / "checkpoints")] == ["checkpoint-10"]


BUSY_AT_THE_END = """
import atexit, sys, torch, torch.distributed as dist
from hpcgrpo.launch.one_rank import then_leave

def program():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(1000):  # after `sys.exit(program())` a thread of gloo's would still let go of tensors: SIGABRT
        dist.all_reduce(torch.ones(100_000), async_op=True)
    atexit.register(print, "tidied up")
    {end}

then_leave(program)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("return 2", 2, ""),
        ("sys.exit(143)", 143, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('why it ended')", 1, "why it ended\n"),
        ("raise RuntimeError('what went wrong')", 1, "RuntimeError: what went wrong\n"),
    ],
)
def test_a_rank_ends_with_its_own_code_whatever_gloo_still_holds(end: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY_AT_THE_END.format(end=end)], capture_output=True, text=True, timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "tidied up\n"), done.stderr
    assert done.stderr.endswith(said) and "terminate called" not in done.stderr
