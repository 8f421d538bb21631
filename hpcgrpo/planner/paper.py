"""The iGRPO paper's Table S.3 (arXiv 2602.09000) as the planner gives it, and what has to be assumed for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from hpcgrpo import config as configuration
from hpcgrpo.planner import efficiencies, hardware, lengths, speed, work, workload
from hpcgrpo.planner.efficiencies import DEFAULTS, Efficiencies
from hpcgrpo.sections import RunConfig

if TYPE_CHECKING:
    from hpcgrpo.planner.shapes import Shape

COMPLETION_LENGTH = 2048  # tokens at most; Table S.3's measurement, while the training runs had 4096
PROMPT_LENGTH = 1024  # the width that prompts are padded to, and what the second prompt is cut to
RUN_MEAN_LENGTH = 650  # tokens of a completion over a whole run: the middle of Figure S.2's 400 to 900
PUBLISHED_STEPS = 58.6  # 7,500 questions x 8 completions / 1,024, of GRPO
SENSITIVITY = (400, 900, 1400)  # tokens of a completion on average
ROUNDING = 0.005  # of the published samples/s

NODES = {"7b": (2, 8), "14b": (5, 8)}
MODELS = {
    "7b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",
    "14b": "nvidia/OpenMath-Nemotron-14B",
}
ROWS_PER_DEVICE = {"7b": 16, "14b": 4}
DATA = {
    "7b": {"preset": "math", "max_samples": 7500},
    "14b": {"preset": "openr1_math_220k", "max_samples": 94000},
}
GRPO = {"name": "grpo", "num_generations": 8, "epsilon": 0.2, "beta": 0.0}

COLUMNS = ("peak_memory_gb", "samples_per_second", "gpu_hours")
LINES = {"grpo-7b": "GRPO", "igrpo-7b": "iGRPO"}  # nothing is published for 14B

MemoryOf = Callable[
    [RunConfig, "Shape", bool], float
]  # config, shape, whether it is the original stack -> GB


@cache
def published() -> dict[str, dict[str, float]]:
    """Table S.3 by run."""
    import yaml

    text = (resources.files("hpcgrpo") / "data" / "published.yaml").read_text(encoding="utf-8")
    rows = yaml.safe_load(text)["igrpo_table_s3"]["rows"]
    return {name: dict(zip(COLUMNS, rows[line], strict=True)) for name, line in LINES.items()}


@dataclass(frozen=True)
class Row:
    """One line of the table: the original stack's figures, and our stack's for the same run."""

    name: str
    original: speed.Estimate  # the throughput figure's step
    run: speed.Estimate  # the whole run's mean step
    ours: speed.Estimate
    peak_memory_gb: float
    ours_peak_memory_gb: float


def config(name: str, *, ours: bool = False) -> RunConfig:
    """The run that a line of the table stands for, such as `igrpo-7b`.

    configs/grpo_7b.yaml and its kin with the table's completion length; `ours` packs rows and cuts no draft.
    """
    method, size = name.split("-")
    nodes, gpus = NODES[size]
    cut = {} if ours else {"max_refine_prompt_length": PROMPT_LENGTH}
    drafts = {"name": "igrpo", "drafts": 4, "base": {**GRPO, "num_generations": 4}, **cut}
    return configuration.parse(
        {
            "name": name,
            "model_name_or_path": MODELS[size],
            "algorithm": drafts if method == "igrpo" else GRPO,
            "rewards": {"accuracy": 1.0},
            "data": DATA[size],
            "generation": {
                "backend": "vllm",
                "temperature": 0.7,
                "max_prompt_length": PROMPT_LENGTH,
                "max_completion_length": COMPLETION_LENGTH,
                "vllm_gpu_memory_utilization": 0.85,
            },
            "train": {
                "per_device_train_batch_size": ROWS_PER_DEVICE[size],
                "gradient_accumulation_steps": 8,
                "bf16": True,
                "gradient_checkpointing": True,
                "attn_implementation": "packed" if ours else "flash_attention_2",
                "save_steps": 10,
            },
            "cluster": {"nodes": nodes, "vllm_nodes": 1, "gpus_per_node": gpus, "cpus_per_task": 64},
        },
        source=f"the paper's {name}",
    )


def row(name: str, shape: Shape, memory_of: MemoryOf, numbers: Efficiencies = DEFAULTS) -> Row:
    """One line: as the original stack does it on A100s, and as ours does."""
    original, own, machine = config(name), config(name, ours=True), hardware.find("a100-80gb")
    return Row(
        name=name,
        original=timed(original, shape, None, numbers),
        run=timed(original, shape, RUN_MEAN_LENGTH, numbers),
        ours=speed.step(own, _load(own, None), shape, machine, numbers),
        peak_memory_gb=memory_of(original, shape, True),
        ours_peak_memory_gb=memory_of(own, shape, False),
    )


def timed(run: RunConfig, shape: Shape, mean: float | None, numbers: Efficiencies) -> speed.Estimate:
    """A step of the original stack on A100s, at a mean completion length in tokens (None: as assumed by default)."""
    rows = run.train.per_device_train_batch_size
    assert rows is not None, "the table's runs name it"
    padding = work.Padding(PROMPT_LENGTH, COMPLETION_LENGTH, rows)
    machine = hardware.find("a100-80gb")
    return speed.step(run, _load(run, mean), shape, machine, numbers, padding=padding, prefills=1)


def _load(run: RunConfig, mean: float | None) -> workload.Workload:
    longest = run.generation.max_completion_length
    mean = mean or workload.ASSUMED_SHARE * longest
    return workload.of(run, lengths.Known(completion=lengths.lognormal(mean, longest, source="assumed")))


def table(
    shape_of: Callable[[str], Shape], memory_of: MemoryOf, numbers: Efficiencies = DEFAULTS
) -> dict[str, Any]:
    """`plan --paper --json`: the four lines, the ratios, what was assumed, and what does not fit what."""
    rows = {
        f"{method}-{size}": row(f"{method}-{size}", shape_of(MODELS[size]), memory_of, numbers)
        for size in MODELS
        for method in ("grpo", "igrpo")
    }
    steps = {size: rows[f"grpo-{size}"].original.steps for size in MODELS}
    return {
        "rows": [_line(each, steps[each.name.split("-")[1]]) for each in rows.values()],
        "ratios": _ratios(rows, steps["7b"]),
        "assumptions": list(ASSUMPTIONS),
        "free_numbers": {
            "fitted": 0,
            "chosen": len(CHOSEN),
            "figures": 4,
            "which": list(CHOSEN),
            "efficiencies": {
                "count": efficiencies.FREE,
                "note": "the planner's defaults, the same for every line, not chosen for this table",
            },
        },
        "sensitivity": _sensitivity(shape_of(MODELS["7b"]), numbers),
        "implied": implied(rows["grpo-7b"], rows["igrpo-7b"], numbers),
        "conflicts": list(conflicts()),
    }


def _line(each: Row, steps: int) -> dict[str, Any]:
    estimate, run = each.original, each.run
    low, high = estimate.interval(estimate.samples_per_second, inverse=True)
    hours = gpu_hours(run, steps)
    return {
        "name": each.name,
        "peak_memory_gb": each.peak_memory_gb,
        "samples_per_second": estimate.samples_per_second,
        "gpu_hours": hours,
        "published": published().get(each.name, {}),
        "samples_per_second_interval": [low, high],
        "gpu_hours_interval": list(run.interval(hours)),
        "seconds_per_step": dict(estimate.phases),
        "steps": steps,
        "ours": {
            "peak_memory_gb": each.ours_peak_memory_gb,
            "samples_per_second": each.ours.samples_per_second,
            "completions_per_second": each.ours.completions_per_second,
            "gpu_hours": gpu_hours(each.ours, each.ours.steps),
            "seconds_per_step": dict(each.ours.phases),
            "steps": each.ours.steps,
        },
    }


def gpu_hours(estimate: speed.Estimate, steps: int) -> float:
    """Of so many steps like this one and what a run takes besides them."""
    seconds = steps * estimate.step_seconds + estimate.other_seconds
    return estimate.devices * seconds / 3600


def _ratios(rows: Mapping[str, Row], steps: int) -> dict[str, Any]:
    grpo, igrpo = rows["grpo-7b"], rows["igrpo-7b"]
    one, other = (published()[name] for name in LINES)
    return {
        "samples_per_second": igrpo.original.samples_per_second / grpo.original.samples_per_second,
        "samples_per_second_published": other["samples_per_second"] / one["samples_per_second"],
        "gpu_hours": gpu_hours(igrpo.run, steps) / gpu_hours(grpo.run, steps),
        "gpu_hours_published": other["gpu_hours"] / one["gpu_hours"],
        "gpu_hours_at_throughput_lengths": gpu_hours(igrpo.original, steps) / gpu_hours(grpo.original, steps),
    }


def _sensitivity(shape: Shape, numbers: Efficiencies) -> list[dict[str, float]]:
    """The throughput ratio at other mean lengths, which are the least certain of what is assumed."""
    found = []
    for mean in SENSITIVITY:
        grpo, igrpo = (timed(config(name), shape, mean, numbers) for name in LINES)
        ratio = igrpo.samples_per_second / grpo.samples_per_second
        found.append({"mean_length": float(mean), "samples_per_second_ratio": ratio})
    return found


def implied(grpo: Row, igrpo: Row, numbers: Efficiencies = DEFAULTS) -> dict[str, float]:
    """The two factors, on the learner's and on the generator's seconds, at which both published samples/s come out.

    Two numbers for two figures: they fit by construction and prove nothing; their sizes tell whether the figures are
    plausible for such a stack.
    """
    learner, generator, target = [], [], []
    for each in (grpo, igrpo):
        phases = each.original.phases
        samples = each.original.samples_per_second * each.original.step_seconds
        learner.append(phases["update"])
        generator.append(phases["generate"])
        rest = each.original.step_seconds - phases["update"] - phases["generate"]
        target.append(samples / published()[each.name]["samples_per_second"] - rest)
    determinant = learner[0] * generator[1] - learner[1] * generator[0]
    slower = (target[0] * generator[1] - target[1] * generator[0]) / determinant
    generating = (learner[0] * target[1] - learner[1] * target[0]) / determinant
    share = numbers["learner_flops"].value / slower if slower > 0 else float("nan")
    return {
        "learner_seconds_factor": slower,
        "generator_seconds_factor": generating,
        "learner_flops": share,
    }


def conflicts() -> Sequence[str]:
    """Where the published figures do not fit each other, in numbers."""
    grpo, igrpo = (published()[name] for name in LINES)
    samples = 128  # of an optimizer step by the published formula: 16 per device x 8 devices
    by_rate = [samples / each["samples_per_second"] for each in (grpo, igrpo)]
    by_hours = [each["gpu_hours"] / 16 * 3600 / PUBLISHED_STEPS for each in (grpo, igrpo)]
    rates = (grpo["samples_per_second"], igrpo["samples_per_second"])
    least = (rates[0] - ROUNDING) / (rates[1] + ROUNDING)
    most = (rates[0] + ROUNDING) / (rates[1] - ROUNDING)
    extra = (igrpo["gpu_hours"] - grpo["gpu_hours"]) / 16 * 3600
    steps = extra / (by_rate[1] - by_rate[0])
    rest = grpo["gpu_hours"] / 16 - steps * by_rate[0] / 3600
    own = [
        each["gpu_hours"] / 16 * 3600 / seconds for each, seconds in zip((grpo, igrpo), by_rate, strict=True)
    ]
    return (
        f"By samples/s a step takes {by_rate[0]:.0f} s (GRPO) and {by_rate[1]:.0f} s (iGRPO), a ratio of"
        f" {by_rate[1] / by_rate[0]:.3f} ({least:.3f} to {most:.3f} with the rounding). By GPU-hours over 16 GPUs and"
        f" {PUBLISHED_STEPS} steps it takes {by_hours[0]:.0f} s and {by_hours[1]:.0f} s, a ratio of"
        f" {by_hours[1] / by_hours[0]:.3f}. For equal step counts both cannot be figures of the whole run.",
        f"What would reconcile them: {steps:.0f} steps of both and {rest:.1f} h outside the steps, the same for both;"
        f" or unequal step counts, {own[0]:.1f} (GRPO) and {own[1]:.1f} (iGRPO); or GPU-hours of whole runs with"
        " completions shorter than in the throughput measurement, as assumed here.",
        "At 1,024 trained completions a step one pass over MATH is 58 steps for GRPO (128 questions each) and 29 for"
        " iGRPO (256): per pass over the data iGRPO would then take far fewer GPU-hours than GRPO, not 13 % more. Equal"
        " step counts are assumed for that figure.",
        "Peak memory equal within 0.0063 GB means that both ran at one padded width (a prompt token costs about 3.7"
        " MB), so iGRPO's question and draft were cut to the prompt length of 1,024.",
        "samples/s as Appendix D defines it leaves gradient accumulation out: 8 times as many completions are trained"
        " on, and with iGRPO twice as many again are sampled.",
    )


CHOSEN = (
    f"throughput: completions of {workload.ASSUMED_SHARE:g} x {COMPLETION_LENGTH} tokens on average (the planner's"
    " default for lengths that are not known)",
    f"GPU-hours: completions of {RUN_MEAN_LENGTH} tokens on average over the run (middle of Figure S.2's 400 to 900)",
    f"prompts padded to {PROMPT_LENGTH}, and the second prompt cut to that (max prompt length in the paper's text)",
    "GPU-hours: as many steps of iGRPO as of GRPO",
)
ASSUMPTIONS = (
    "original stack: every row padded to the longest prompt and completion, logits in bf16 and not chunked, layers"
    " checkpointed, one server of one GPU each, sampling and learning in turn",
    *CHOSEN,
    "14B: the same lengths; nothing is published to compare with",
    "samples/s and GPU-hours of the efficiencies' defaults; their interval is that of nine in ten stacks",
)


def show(found: Mapping[str, Any]) -> None:
    """Print the table for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        "run", "", "peak GB", "samples/s", "GPU-hours", "s per step", title="Table S.3 of arXiv 2602.09000"
    )
    for line in found["rows"]:
        low, high = line["samples_per_second_interval"]
        less, more = line["gpu_hours_interval"]
        seconds, own = sum(line["seconds_per_step"].values()), line["ours"]
        rate = f"{line['samples_per_second']:.2f} ({low:.2f}-{high:.2f})"
        hours = f"{line['gpu_hours']:,.1f} ({less:,.0f}-{more:,.0f})"
        table.add_row(
            line["name"], "original stack", f"{line['peak_memory_gb']:.2f}", rate, hours, f"{seconds:.0f}"
        )
        if known := line["published"]:
            cells = (
                f"{known['peak_memory_gb']:.4f}",
                f"{known['samples_per_second']}",
                f"{known['gpu_hours']}",
            )
            table.add_row("", "published", *cells, f"{128 / known['samples_per_second']:.0f}")
        cells = (
            f"{own['peak_memory_gb']:.2f}",
            f"{own['samples_per_second']:.2f}",
            f"{own['gpu_hours']:,.1f}",
        )
        table.add_row(
            "", "this package", *cells, f"{sum(own['seconds_per_step'].values()):.0f}", end_section=True
        )
    console.print(table)
    for text in _said(found):
        console.print(text, markup=False, highlight=False)


def _said(found: Mapping[str, Any]) -> Sequence[str]:
    peak = found["rows"][0]["peak_memory_gb"]
    ratios, free, implied_ = found["ratios"], found["free_numbers"], found["implied"]
    return (
        f"iGRPO / GRPO, 7B: samples/s {ratios['samples_per_second']:.3f} (published"
        f" {ratios['samples_per_second_published']:.3f}), GPU-hours {ratios['gpu_hours']:.3f} (published"
        f" {ratios['gpu_hours_published']:.3f}).",
        f"Peak memory at that width: {peak:.2f} GB are {peak * 1e9 / 2**30:.2f} GiB; the paper says GB and not how"
        " it was converted.",
        "The first ratio at other mean lengths: "
        + ", ".join(
            f"{s['samples_per_second_ratio']:.3f} at {s['mean_length']:.0f}" for s in found["sensitivity"]
        )
        + " tokens.",
        "The second ratio, were the run's completions as long as the throughput measurement's:"
        f" {ratios['gpu_hours_at_throughput_lengths']:.3f}.",
        f"Numbers fitted to these figures: {free['fitted']}. Chosen beside the fit: {free['chosen']}, for"
        f" {free['figures']} figures (two ratios and two peaks), with these known. Efficiencies:"
        f" {free['efficiencies']['count']}, the"
        " defaults, one set for all lines.",
        f"Both published samples/s would come out with the learner at {implied_['learner_flops']:.2f} of the GPUs' rate"
        f" (default 0.40) and generation {implied_['generator_seconds_factor']:.2f} times as long: two numbers for two"
        " figures, so no evidence for either.",
        "Assumed:",
        *(f"  - {text}" for text in found["assumptions"]),
        "Where the published figures do not fit each other:",
        *(f"  - {text}" for text in found["conflicts"]),
    )
