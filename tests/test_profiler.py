"""What a run took: Appendix D's definitions by hand, phases that sum to the step, on a fake clock and for real."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from runs import hpcgrpo, make_model, undocumented

from hpcgrpo import profiler
from hpcgrpo.attempt import Attempt
from hpcgrpo.profiler import Profile, Spent

ROOT = Path(__file__).parents[1]


@dataclass
class Clock:
    """Stands still until it is told."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Allocator:
    """A GPU's allocator as torch shows it."""

    held: int = 0
    peak: int = 0
    freed: list[int] = field(default_factory=list)

    def hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.held

    def max_memory_allocated(self) -> int:
        return self.peak


def test_throughput_and_hours_as_the_paper_defines_them() -> None:
    """Published: 83.3 GPU-hours on 16 GPUs and 0.41 samples/s, 8 learners with 16 completions each."""
    elapsed = 83.3 * 3600 / 16
    assert profiler.gpu_hours(16, elapsed) == pytest.approx(83.3)
    assert profiler.samples_per_second(60, 16, 8, elapsed) == pytest.approx(0.41, abs=0.001)
    assert profiler.samples_per_second(3, 4, 2, 48.0) == 0.5  # 3 x 4 x 2 over 48 s, whatever was accumulated


def test_peak_memory_is_the_allocators_since_its_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    allocator = Allocator()
    monkeypatch.setattr(profiler, "_cuda", lambda: True)
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(allocator, name))
    allocator.hold(90_000_000_000)
    allocator.hold(-80_000_000_000)
    profiler.reset_peak_memory()
    assert profiler.peak_memory_gb() == 10.0  # of 10^9 bytes, without what was held before
    allocator.hold(44_928_600_000)
    allocator.hold(-44_000_000_000)
    assert profiler.peak_memory_gb() == 54.9286
    allocator.hold(1_000_000)
    assert profiler.peak_memory_gb() == 54.9286  # since the start, not of the last step


def test_peak_memory_of_a_process_counts_from_its_reset() -> None:
    code = (
        "import torch; from hpcgrpo import profiler as p\n"
        "x = torch.ones(10**8); del x; p.reset_peak_memory(); a = p.peak_memory_gb()\n"
        "y = torch.ones(5 * 10**7); del y; b = p.peak_memory_gb(); print(a, b)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    before, after = map(float, done.stdout.split())
    assert after - before == pytest.approx(0.2, abs=0.05)  # 5e7 float32 = 0.2 GB, not the 0.4 GB of before


# ---- phases on a fake clock


def profile_on(clock: Clock, **more: Any) -> Profile:
    return Profile(clock=clock, cpu_clock=lambda: clock.now / 4, **more)


def test_an_inner_phase_stops_the_clock_of_the_outer_one() -> None:
    clock = Clock()
    profile = profile_on(clock)
    clock.now += 7  # models are loaded
    with profile.phase("sync"):
        clock.now += 2
    profile.begin_steps()
    with profile.phase("generate/stage_1"):
        clock.now += 5
    with profile.phase("generate/stage_2"):
        clock.now += 6
        with profile.phase("exchange"):
            clock.now += 1
            with profile.phase("wait"):
                clock.now += 3
            clock.now += 0.5
    clock.now += 0.25  # nothing names it
    with profile.phase("peer_update"):
        clock.now += 0.125
        with profile.part("forward_backward"):
            clock.now += 8
        with profile.part("optimizer"):
            clock.now += 4
    spent, cpu = profile.end_step()
    assert spent.phases == {"generate": 11, "exchange": 1.5, "wait": 3, "other": 0.25, "peer_update": 12.125}
    assert spent.parts == {
        "generate/stage_1": 5,
        "generate/stage_2": 6,
        "peer_update/forward_backward": 8,
        "peer_update/optimizer": 4,
    }
    assert spent.seconds == 27.875 and cpu.seconds == 27.875 / 4
    assert spent.named("timing_s")["timing_s/generate/stage_1"] == 5
    assert profile.total.phases["start"] == 7 and profile.total.phases["sync"] == 2
    clock.now += 1.5
    assert profile.total.seconds == profile.elapsed_seconds == 38.375


def test_what_an_evaluation_samples_and_waits_for_counts_to_it() -> None:
    clock = Clock()
    profile = profile_on(clock)
    profile.begin_steps()
    with profile.phase("evaluate"), profile.phase("generate"):
        clock.now += 2
        with profile.phase("wait"):
            clock.now += 1
    with profile.phase("generate"):
        clock.now += 4
    assert profile.end_step()[0].phases == {"evaluate": 3, "generate": 4, "other": 0}


def test_a_phase_ends_with_what_its_block_raises() -> None:
    clock = Clock()
    profile = profile_on(clock)
    profile.begin_steps()
    with pytest.raises(ZeroDivisionError), profile.phase("generate"), profile.phase("wait"):
        clock.now += 1
        raise ZeroDivisionError
    clock.now += 2
    assert profile.end_step()[0].phases == {"other": 2, "generate": 0, "wait": 1}


def test_a_phase_ends_when_the_device_has_computed_it() -> None:
    clock = Clock()
    ahead = [0.0]

    def settle() -> None:
        clock.now += ahead.pop() if ahead else 0

    profile = profile_on(clock, settle=settle)
    profile.begin_steps()
    with profile.phase("update"):
        ahead.append(6.0)  # queued on the device; the call comes back at once
    assert profile.end_step()[0].phases["update"] == 6


def test_a_later_attempt_goes_on_from_what_the_checkpoint_saw() -> None:
    clock = Clock()
    first = profile_on(clock)
    clock.now += 1
    first.begin_steps()
    with first.phase("update/optimizer"):
        clock.now += 2
    first.counts["flops"] = 12.0
    state, elapsed = json.loads(json.dumps(first.state())), first.elapsed_seconds  # saved in mid-step
    clock.now += 100  # lost
    second = profile_on(clock)
    second.load_state(state, elapsed)
    second.held_before_seconds = 103.0
    clock.now += 4
    second.begin_steps()
    with second.phase("update/optimizer"):
        clock.now += 8
    assert second.total.phases == {"start": 5, "update": 10, "other": 0}
    assert second.total.parts == {"update/optimizer": 10}
    assert second.total.seconds == second.elapsed_seconds == 15
    assert second.held_seconds == 115 and second.counts == {"flops": 12.0}


def test_an_earlier_versions_checkpoint_is_understood() -> None:
    clock = Clock()
    profile = profile_on(clock)
    old = {"explore": 60.0, "generate": 50.0, "grade": 4.0, "exchange": 1.0, "update": 30.0}
    profile.load_state({"phase_seconds": old}, elapsed_seconds=99.0)
    assert profile.total == Spent(
        {"generate": 50, "grade": 4, "exchange": 1, "update": 30, "other": 5, "start": 0}, {}
    )


def test_devices_are_held_from_a_jobs_first_minute(tmp_path: Path) -> None:
    """A start of a job counts from its lease: the engines come up before any learner rank lives."""
    attempt = Attempt(tmp_path / "slurm" / "7.0", 0)
    attempt.folder.mkdir(parents=True)
    assert attempt.leased_at() is None
    (tmp_path / "slurm" / "lease.json").write_text('{"attempt": "7.0", "time": 1234.5}')
    assert attempt.leased_at() == 1234.5


# ---- a real run

CONFIG = """
name: run
model_name_or_path: {model}
algorithm:
  name: igrpo
  drafts: 2
  refine_template: "{{question}}#{{draft}}#{{question}}"
  base: {{name: grpo, num_generations: 2, beta: 0.01}}
rewards: {{accuracy: 1.0}}
data: {{preset: chain, max_samples: 64, options: {{digits: 4}}}}
generation: {{max_prompt_length: 32, max_completion_length: 8}}
train: {{train_batch_size: 8, generation_batch_size: 16, max_steps: 4, num_iterations: 2, save_steps: 2}}
eval: {{data: {{preset: chain, max_samples: 8, options: {{digits: 4}}}}, every_steps: 2, two_pass: true}}
cluster: {{nproc_per_node: 2}}
output_dir: {folder}
device: cpu
"""

PARTS = {
    "generate": ("stage_1", "stage_2"),
    "logprobs": ("old", "reference"),  # old: of the second optimizer step
    "update": ("forward_backward", "optimizer"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Four steps of two ranks, the last one after a restart."""
    folder = tmp_path_factory.mktemp("profiler")
    path = folder / "run.yaml"
    path.write_text(CONFIG.format(model=make_model(folder / "model"), folder=folder))
    for steps in (3, 4):
        done = hpcgrpo("train", str(path), f"train.max_steps={steps}")
        assert done.returncode == 0, done.stderr
    yield folder / "run"


def lines(run: Path, *, evaluations: bool = False) -> list[dict[str, float]]:
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["step"] > 0 or evaluations]


def of_phases(line: dict[str, float], prefix: str) -> dict[str, float]:
    return {k: v for k, v in line.items() if k.startswith(prefix) and "/" not in k.removeprefix(prefix)}


@pytest.mark.slow
def test_the_phases_of_a_real_step_sum_to_it(run: Path) -> None:
    """And name it: what no phase names is little."""
    for line in lines(run):
        phases = of_phases(line, "timing_s/")
        assert sum(phases.values()) == pytest.approx(line["step_time"], rel=0.02)
        for phase, parts in PARTS.items():
            spent = [line[f"timing_s/{phase}/{part}"] for part in parts]
            assert min(spent) > 0 and sum(spent) <= phases[f"timing_s/{phase}"] * (1 + 1e-9)
        stages = line["timing_s/generate/stage_1"] + line["timing_s/generate/stage_2"]
        assert stages == pytest.approx(line["timing_s/generate"])
        assert {"timing_s/wait", "timing_s/exchange", "timing_s/grade", "timing_s/sync"} < set(phases)
        assert min(phases.values()) >= 0
    assert [line["step"] for line in lines(run) if line.get("timing_s/evaluate")] == [2, 3, 4]
    whole = sum(line["step_time"] for line in lines(run))
    other = [line["timing_s/other"] / line["step_time"] for line in lines(run)]
    assert median(other) < 0.05, other  # a machine that stands still does so in any phase
    assert sum(sum(of_phases(line, "timing_cpu_s/").values()) for line in lines(run)) < 2 * whole


@pytest.mark.slow
def test_every_number_of_a_real_run_is_explained(run: Path) -> None:
    assert undocumented({name for line in lines(run, evaluations=True) for name in line}) == []
    keys = json.loads((run / "profile.json").read_text())
    explained = (ROOT / "docs" / "metrics.md").read_text().split("## `profile.json`")[1]
    assert [key for key in keys if f"`{key}`" not in explained] == []


def test_every_phase_is_explained() -> None:
    names = {f"timing_s/{phase}" for phase in profiler.PHASES if phase != "start"}
    names |= {f"timing_s/{phase}/{part}" for phase, parts in PARTS.items() for part in parts}
    assert undocumented(names) == []
    assert undocumented(["timing_s/explore", "perf/mfu/x", "rewards/a/b/mean", "mfu"]) != []


@pytest.mark.slow
def test_a_real_runs_profile_agrees_with_its_metrics(run: Path) -> None:
    profile = json.loads((run / "profile.json").read_text())
    assert sum(profile["phase_seconds"].values()) == pytest.approx(profile["elapsed_seconds"], rel=0.02)
    assert profile["held_seconds"] >= profile["elapsed_seconds"] * 0.999
    assert profile["cpu_rank_hours"] == pytest.approx(2 * profile["held_seconds"] / 3600)
    # 4 steps of 4 optimizer steps, a rank's 4 completions x 2 ranks
    assert profile["samples_per_second"] == pytest.approx(16 * 4 * 2 / profile["elapsed_seconds"], rel=0.05)
    update = sum(line["timing_s/update/optimizer"] for line in lines(run))
    assert profile["part_seconds"]["update/optimizer"] == pytest.approx(update, rel=1e-6)
    assert profile["phase_seconds"]["start"] > 0
    assert profile["peak_memory_gb"] == lines(run)[-1]["perf/peak_memory_gb"] > 0.1
    for found, prefix in ((lines(run)[-1], "perf/"), (profile, "")):
        assert found[f"{prefix}learner_flops_per_second"] > 1e6
        assert found[f"{prefix}decode_bytes_per_second"] > 1e5
        assert f"{prefix}mfu" not in found and f"{prefix}mbu" not in found  # a CPU's rates are not known
    line = lines(run)[-1]
    tokens = line["num_tokens"] - lines(run)[-2]["num_tokens"]
    working = line["step_time"] - line["timing_s/evaluate"] - line["timing_s/save"]
    assert line["perf/tokens_per_second_per_device"] == pytest.approx(tokens / working / 2)
    assert line["perf/completions_per_second"] == pytest.approx(32 / working)  # 16 trained on and 16 drafts
