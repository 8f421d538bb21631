"""What a run writes: metrics without gaps or repeats, folders private and locked."""

from __future__ import annotations

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcgrpo.batching import Credited, Plan
from hpcgrpo.journal import FolderInUse, Journal, claim, read_metrics, write_atomically
from hpcgrpo.metrics import learning_metrics, rollout_metrics
from hpcgrpo.types import Completion, Group, Progress, Prompt, Rollout, Score, Totals


def test_a_later_attempt_drops_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = Journal(tmp_path, -1, (), {}, log_completions=False)
    for step in range(1, 6):
        first.metrics(step, {"reward": step / 10})
        with (tmp_path / "metrics.jsonl").open("ab") as damaged:
            damaged.write(b'{"ste\xff\n[1]\n{}\n')  # what a bad disk left between good lines
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "rew')  # cut off by a crash
    second = Journal(tmp_path, 3, (), {}, log_completions=False)
    second.metrics(4, {"reward": 9.0})
    assert [(m["step"], m["reward"]) for m in read_metrics(tmp_path)] == [
        (1, 0.1),
        (2, 0.2),
        (3, 0.3),
        (4, 9.0),
    ]


def test_several_writers_of_one_file_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    texts = [str(i) * 200_000 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write_atomically, path, text) for _ in range(25) for text in texts]
        while not all(w.done() for w in writing):
            assert not path.exists() or path.read_text() in texts
    assert [w.result() for w in writing] == [None] * 100
    assert [p.name for p in tmp_path.iterdir()] == ["settings.json"]


def test_rollouts_of_a_step_are_replaced_whole(tmp_path: Path) -> None:
    journal = Journal(tmp_path, -1, (), {}, log_completions=True)
    journal.rollouts(1, [{"text": "ä"}, {"text": "b"}])
    journal.rollouts(1, [{"text": "c"}])
    assert (tmp_path / "rollouts/step-000001.jsonl").read_text() == '{"text": "c"}\n'


def test_tensorboard_gets_every_value_and_a_resume_purges(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Journal(tmp_path, -1, ("tensorboard",), {}, log_completions=False).metrics(1, {"reward": 0.25})
    Journal(tmp_path, 0, ("tensorboard",), {}, log_completions=False).metrics(1, {"reward": 0.5})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward")] == [(1, 0.5)]


def test_the_folder_is_private_and_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code = (
        "from hpcgrpo.journal import claim; from pathlib import Path\n"
        f"x = claim(Path({str(folder)!r})); print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(FolderInUse, match=f"pid {other.pid} on"):
        claim(folder)
    other.kill()
    other.wait()
    claim(folder).close()


def test_atomic_writes_leave_no_temporary_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "x.json", "1")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["x.json"]


def group(rewards: list[float], lengths: list[int], drafts: list[float] = ()) -> Group:  # type: ignore[assignment]
    prompt = Prompt(0, 0, (), "", (1, 2, 3))

    def rollout(reward: float, length: int) -> Rollout:
        reason = "length" if length == 10 else "stop"
        completion = Completion((5,) * length, (-1.0,) * length, reason, "", 0)
        outcome = "right" if reward else "wrong"
        return Rollout(
            prompt, completion, Score(reward, {"accuracy": reward, "extra": None}, {"accuracy": outcome})
        )

    made = tuple(rollout(r, n) for r, n in zip(rewards, lengths, strict=True))
    return Group(prompt, made, tuple(rollout(r, 2) for r in drafts))


def test_rollout_metrics_by_hand() -> None:
    groups = (group([1, 0], [4, 10], drafts=[0, 1]), group([1, 1], [2, 4], drafts=[0, 0]))
    credited = Credited(groups, ((1.0, -1.0), (0.0, 0.0)), ((0, 1), (0,)))
    found = rollout_metrics(credited, Progress())
    assert found["reward"] == 0.75
    assert found["reward_std"] == pytest.approx((0.5**0.5 + 0) / 2)  # sample std of (1, 0) is sqrt(1/2)
    assert found["frac_reward_zero_std"] == 0.5
    assert found["rewards/accuracy/mean"] == 0.75 and "rewards/extra/mean" not in found
    assert found["rewards/accuracy/right"] == 0.75 and found["rewards/accuracy/wrong"] == 0.25
    assert found["completions/mean_length"] == 5.0
    assert found["completions/clipped_ratio"] == 0.25
    assert found["completions/mean_terminated_length"] == pytest.approx(10 / 3)
    assert (found["drafts/reward"], found["drafts/best_reward"]) == (0.25, 0.5)
    assert (found["completions/sampled"], found["completions/kept"]) == (8, 3)
    assert found["num_tokens"] == 8 * 3 + 20 + 4 * 2


def test_learning_metrics_add_ranks_and_divide_by_tokens() -> None:
    ranks = [
        {"loss": 0.1, "kl": 6.0, "x/max": 2.0, "grad_norm": 3.0, "skipped_updates": 0.0},
        {"loss": 0.3, "kl": 2.0, "x/max": 5.0, "grad_norm": 3.0, "skipped_updates": 0.0},
    ]
    empty = {"grad_norm": 3.0, "skipped_updates": 0.0}  # a rank without rows
    totals = Totals(
        rows=2, tokens=4, sampled_rows=2, sampled_tokens=4, max_completion_length=9, rows_per_device=1
    )
    found = learning_metrics(
        [([*ranks, empty], 4, 0.5)], [Plan((((),), ((),), ((),)), totals, ((0.0,),) * 3)]
    )
    assert found["loss"] == pytest.approx(0.4)
    assert found["kl"] == 2.0  # 8 over 4 tokens
    assert found["x/max"] == 5.0
    assert found["grad_norm"] == 3.0
    assert learning_metrics([], []) == {"updates": 0.0}
