"""What of a machine's nominal rates is reached, and what costs time whatever the machine: a dozen numbers, one set for
all algorithms and models, with the spread that each has among published stacks."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcgrpo.config_file import ConfigError


@dataclass(frozen=True)
class Number:
    """One efficiency: its value, and between which values nine in ten stacks are taken to lie."""

    value: float
    low: float
    high: float
    what: str = ""
    source: str = ""


Efficiencies = Mapping[str, Number]

DEFAULTS: dict[str, Number] = {
    "learner_flops": Number(
        0.40,
        0.25,
        0.57,
        "share of the dense bf16 rate that the learner's passes reach, recomputation counted as work",
        "PyTorch FSDP, Llama 2 7B on 128 A100: 0.57 (IBM and Meta, 2024); lmms-engine, Qwen2.5 7B packed on 32 A800:"
        " 0.50-0.55; untuned FSDP: below 0.30",
    ),
    "learner_pass_seconds": Number(
        0.10,
        0.03,
        0.30,
        "of a micro-batch, whatever its size: launches and what is not overlapped",
        "assumed",
    ),
    "segment_seconds": Number(
        5e-5,
        2e-5,
        2e-4,
        "of one layer's attention over one prompt or completion of a packed row: kernels called one by one",
        "assumed: a few launches of 5 to 10 microseconds, forward and backward",
    ),
    "update_seconds": Number(
        0.5,
        0.1,
        2.0,
        "of an optimizer step, whatever the model: norm, clipping, waiting for ranks",
        "assumed",
    ),
    "generation_flops": Number(
        0.50, 0.35, 0.65, "share of the dense bf16 rate in prefill and in large decoding batches", "assumed"
    ),
    "decode_bandwidth": Number(
        0.70,
        0.55,
        0.80,
        "share of the memory bandwidth at which decoding reads weights and key-value cache",
        "vLLM 0.23, Llama 3.1 8B on an A100, one request: 0.77 (J. Musgrave's sweep); large batches stay bound by"
        " memory (arXiv 2503.08311)",
    ),
    "decode_step_seconds": Number(
        0.004,
        0.001,
        0.008,
        "of a decoding step, whatever the batch: scheduling, sampling, launches",
        "vLLM 0.5.3, Llama 3 8B on an H100: 62 % of the time outside the GPU, and 2.7 x less time a token in 0.6"
        " (blog.vllm.ai, 2024-09-05)",
    ),
    "decode_layer_seconds": Number(
        2e-5,
        5e-6,
        1e-4,
        "of a decoding step and layer, besides what is read and computed: kernels one after the other",
        "assumed: CUDA graphs hide the launches, not the kernels' own starts",
    ),
    "request_seconds": Number(
        0.001, 0.0003, 0.003, "of a completion at its engine or rank: transport and tokens to text", "assumed"
    ),
    "network": Number(
        0.70, 0.50, 0.85, "share of NVLink's and the network's rates that collectives reach", "assumed"
    ),
    "grade_seconds": Number(
        0.004, 0.002, 0.020, "of grading a completion, of one process", "math-verify 0.9: median 2.9 ms"
    ),
    "sync_seconds": Number(
        2.0, 0.5, 10.0, "of pushing weights, besides the bytes: pausing engines, setting up", "assumed"
    ),
    "step_seconds": Number(
        1.0, 0.3, 5.0, "of a step, for all the rest: exchange, journal, waiting", "assumed"
    ),
    "start_seconds": Number(
        300.0, 100.0, 900.0, "of a start of the run: loading models, engines coming up, compiling", "assumed"
    ),
}
FREE = len(DEFAULTS)

# What differs on a CPU before any calibration, within a factor of CPU_SPREAD: shares of what numpy reaches, and
# overheads of small models.
CPU: Mapping[str, float] = {
    "learner_flops": 0.5,
    "learner_pass_seconds": 0.02,
    "update_seconds": 0.02,
    "segment_seconds": 2e-4,
    "generation_flops": 0.3,
    "decode_bandwidth": 0.5,
    "decode_step_seconds": 0.001,
    "decode_layer_seconds": 0.001,
    "request_seconds": 0.0003,
    "grade_seconds": 0.001,
    "sync_seconds": 0.02,
    "step_seconds": 0.02,
    "start_seconds": 20.0,
}
CPU_SPREAD = 3.0


def of_device(device: str) -> Efficiencies:
    """What is taken where nothing was fitted: the defaults, and on a "cpu" its own with a wide spread."""
    if device != "cpu":
        return DEFAULTS
    own = {
        name: replace(DEFAULTS[name], value=v, low=v / CPU_SPREAD, high=v * CPU_SPREAD, source="assumed")
        for name, v in CPU.items()
    }
    return {**DEFAULTS, **own}


def values(numbers: Efficiencies) -> dict[str, float]:
    """The values alone."""
    return {name: number.value for name, number in numbers.items()}


def read(path: str | Path) -> tuple[dict[str, Number], dict[str, Any]]:
    """Efficiencies from a YAML file (`efficiencies: {name: value}` or `{name: {value, low, high}}`), those it lacks as
    by default -> them, and the file's other keys (a calibration's machine and residuals).

    Raises ConfigError for a file that is not there, an unknown name, or a number that is none.
    """
    from yaml import YAMLError, safe_load

    path = Path(path).expanduser()
    try:
        found = safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"--efficiencies {path}: no such file; make one with hpcgrpo plan --calibrate logs/NAME"
        ) from None
    except (OSError, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--efficiencies {path}: {' '.join(str(error).split())}") from None
    given = found.get("efficiencies") if isinstance(found, dict) else None
    if not isinstance(given, dict):
        raise ConfigError(
            f"--efficiencies {path}: has no mapping `efficiencies`; make one with hpcgrpo plan --calibrate logs/NAME"
        )
    numbers = {**DEFAULTS, **{str(n): _number(str(n), v, str(path)) for n, v in given.items()}}
    return numbers, {k: v for k, v in found.items() if k != "efficiencies"}


def _number(name: str, given: Any, source: str) -> Number:
    if name not in DEFAULTS:
        near = difflib.get_close_matches(name, DEFAULTS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ConfigError(f"{source}: {name} is no efficiency{hint}; they are {', '.join(DEFAULTS)}")
    parts = given if isinstance(given, dict) else {"value": given}
    try:
        value = float(parts["value"])
        low, high = float(parts.get("low", value)), float(parts.get("high", value))
    except (TypeError, ValueError, KeyError):
        raise ConfigError(
            f"{source}: {name}: {given!r} is no number; write a number or value, low and high"
        ) from None
    if not 0 <= low <= value <= high < float("inf"):
        raise ConfigError(f"{source}: {name}: needs 0 <= low <= value <= high (given {low}, {value}, {high})")
    return Number(value, low, high, DEFAULTS[name].what, source)
