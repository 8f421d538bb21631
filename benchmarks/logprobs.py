"""`hpcgrpo.learning.logprobs.token_logprobs` beside the plain log_softmax over all logits: time and memory.

    .venv/bin/python benchmarks/logprobs.py [--tokens 8192] [--vocabulary 152064] [--hidden 128] [--json]

Each measurement is one forward and backward pass in a process of its own; variants take turns. How to read
the output: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _rows import add_device, at_least, positive, row
from _side import resident_bytes

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_BYTES = 10**9  # promised for 8,192 tokens x 152,064 vocabulary, above the inputs
TEMPERATURE = 0.7
PLAIN_COPIES = 5  # of the [tokens, vocabulary] matrix alive at once in the plain computation, generously

Logprobs = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = (hidden @ weight.T) / TEMPERATURE
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from hpcgrpo.learning.logprobs import token_logprobs

    return token_logprobs(hidden, weight, targets, temperature=TEMPERATURE, with_entropy=False)[0]


def chunked_with_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from hpcgrpo.learning.logprobs import token_logprobs

    return token_logprobs(hidden, weight, targets, temperature=TEMPERATURE)[0]


def logits_again(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """What the backward pass computes a second time: the logits of every chunk, into one buffer."""
    import torch

    from hpcgrpo.learning.logprobs import CHUNK_BYTES

    size = max(1, CHUNK_BYTES // (4 * len(weight)))
    buffer = hidden.new_empty(min(size, len(targets)), len(weight))
    with torch.no_grad():
        for part in hidden.split(size):
            torch.mm(part, weight.T, out=buffer[: len(part)]).div_(TEMPERATURE)


CHUNKS = (2**20, 2**22, 2**24, 2**26, 2**28)  # bytes of logits
VARIANTS: dict[str, Logprobs] = {
    "plain": plain,
    "chunked": chunked,
    "chunked+entropy": chunked_with_entropy,
}


def main() -> None:
    options = parse_arguments()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    result = compare(options)
    print(json.dumps(result, indent=1) if options.json else as_text(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--timed-tokens", type=positive, default=2048, help="halved where plain does not fit")
    parser.add_argument("--vocabulary", type=at_least(2), default=152_064)
    parser.add_argument("--hidden", type=positive, default=128)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="measurements of each variant (default 3)"
    )
    parser.add_argument("--threads", type=positive, default=2, help="OMP_NUM_THREADS (default 2)")
    add_device(parser)
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    parser.add_argument("--chunks", action="store_true", help="time chunks of several sizes too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Memory of what the learner calls at full size; times at fewer tokens, whose plain logits fit here."""
    fits = tokens_that_fit(options)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(options.repeats):
        for name in VARIANTS:
            runs[name].append(in_subprocess(name, options, fits))
    full = {"chunked+entropy": in_subprocess("chunked+entropy", options, options.tokens)}
    again = [in_subprocess("again", options, fits)["cpu_seconds"] for _ in range(options.repeats)]
    chunks = {size: in_subprocess(f"chunk {size}", options, fits) for size in CHUNKS if options.chunks}
    sides = {name: {key: statistics.median(r[key] for r in rs) for key in rs[0]} for name, rs in runs.items()}
    learner = "chunked+entropy"
    return {
        "rows": rows(options, sides["plain"], sides[learner], full[learner]),
        "sizes": {
            key: getattr(options, key) for key in ("tokens", "vocabulary", "hidden", "dtype", "threads")
        },
        "timed_tokens": fits,
        "timed": sides,
        "ratios_to_plain": {name: ratios(runs["plain"], runs[name]) for name in VARIANTS if name != "plain"},
        "recomputed_cpu_seconds": statistics.median(again),
        "chunks": chunks,
        "full_size": full,
        "limit_bytes": LIMIT_BYTES,
        "difference": in_subprocess("difference", options, min(fits, 256)),
    }


def rows(
    options: argparse.Namespace,
    base: Mapping[str, float],
    ours: Mapping[str, float],
    full: Mapping[str, float],
) -> list[dict[str, Any]]:
    """Time and memory of what the learner calls, for `table.py`."""
    clock = "wall_seconds" if options.device == "cuda" else "cpu_seconds"
    gradients = options.vocabulary * options.hidden * (2 if options.dtype == "bfloat16" else 4)
    return [
        row(
            "log-probs, time: log_softmax of all logits",
            base[clock] / ours[clock],
            of="wall time" if options.device == "cuda" else "CPU-seconds",
            bound=3 / 4,
            bound_is="matrix products: the logits twice",
        ),
        row(
            "log-probs, memory: log_softmax of all logits",
            base["peak_bytes"] / ours["peak_bytes"],
            of="peak bytes",
            bound=base["peak_bytes"] / gradients,
            bound_is="the weight's gradient alone",
        ),
        row(
            f"log-probs, memory at {options.tokens:,} tokens: limit",
            LIMIT_BYTES / full["peak_bytes"],
            of="peak bytes",
            promised=1.0,
        ),
    ]


def ratios(base: list[dict[str, float]], other: list[dict[str, float]]) -> dict[str, float]:
    """Median over the turns of other / base, for each quantity (below 1: less than plain)."""
    return {
        key: statistics.median(o[key] / b[key] for b, o in zip(base, other, strict=True)) for key in base[0]
    }


def tokens_that_fit(options: argparse.Namespace) -> int:
    """The tokens to time, halved until the plain computation leaves a quarter of the free memory alone."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free_bytes = int(meminfo["MemAvailable"].split()[0]) * 1024
    tokens: int = min(options.timed_tokens, options.tokens)
    while tokens > 64 and PLAIN_COPIES * 4 * tokens * options.vocabulary > 0.75 * free_bytes:
        tokens //= 2
    return tokens


def in_subprocess(name: str, options: argparse.Namespace, tokens: int) -> dict[str, float]:
    sizes = {
        key: str(getattr(options, key)) for key in ("vocabulary", "hidden", "dtype", "threads", "device")
    }
    flags = [part for key, value in (sizes | {"tokens": str(tokens)}).items() for part in (f"--{key}", value)]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "--measure", name, *flags]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def measure(options: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(options.threads)
    if options.measure == "difference":
        return difference(options)
    if options.measure == "again":
        return timed(lambda given: logits_again(*given), options)
    run = VARIANTS.get(options.measure) or chunks_of(int(options.measure.split()[1]))
    return timed(lambda given: forward_backward(run, given), options)


def chunks_of(size: int) -> Logprobs:
    from hpcgrpo.learning.logprobs import token_logprobs

    return lambda *given: token_logprobs(*given, temperature=TEMPERATURE, chunk_bytes=size)[0]


def timed(
    call: Callable[[tuple[Tensor, Tensor, Tensor]], Any], options: argparse.Namespace
) -> dict[str, float]:
    call(inputs(options, tokens=2))  # threads and allocator start outside the measurement
    given = inputs(options, tokens=options.tokens)
    before = settled_bytes(options.device, "VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    call(given)
    peak = settled_bytes(options.device, "VmHWM")
    return {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": max(1, peak - before),
    }


def settled_bytes(device: str, key: str) -> int:
    """Memory held now (VmRSS) or at most so far (VmHWM), once the device has done what it was given."""
    if device == "cpu":
        return resident_bytes("self", key)
    import torch

    torch.cuda.synchronize()
    if key == "VmHWM":
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def inputs(options: argparse.Namespace, *, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    import torch

    source = torch.Generator().manual_seed(0)
    device = options.device
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(tokens, options.hidden, generator=source).to(device, dtype).requires_grad_()
    weight = (
        (torch.randn(options.vocabulary, options.hidden, generator=source) * 0.1)
        .to(device, dtype)
        .requires_grad_()
    )
    return hidden, weight, torch.randint(options.vocabulary, (tokens,), generator=source).to(device)


def forward_backward(run: Logprobs, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Log-probs and the gradients of a weighted sum of them; peak memory includes those gradients."""
    import torch

    logprobs = run(*given)
    weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    (logprobs.float() * weights).sum().backward()
    hidden, weight, _ = given
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), hidden.grad, weight.grad


def difference(options: argparse.Namespace) -> dict[str, float]:
    """Largest difference of values and gradients from the plain ones, relative to their largest entry."""
    want, got = (forward_backward(run, inputs(options, tokens=options.tokens)) for run in (plain, chunked))
    names = ("logprobs", "hidden_gradient", "weight_gradient")
    apart = {n: float((g - w).abs().max() / w.abs().max()) for n, w, g in zip(names, want, got, strict=True)}
    return apart | {"tokens": options.tokens}


def as_text(result: Mapping[str, Any]) -> str:
    sizes, timed = result["sizes"], result["timed"]
    lines = [
        f"{sizes['vocabulary']} vocabulary, hidden {sizes['hidden']}, {sizes['dtype']}, forward + backward; "
        f"timed at {result['timed_tokens']} tokens",
        f"{'':18}{'CPU-seconds':>12}{'wall':>9}{'peak MB':>10}   of plain's CPU, memory",
    ]
    for name, value in timed.items():
        part = result["ratios_to_plain"].get(name)
        share = f"{part['cpu_seconds']:.2f} x, {part['peak_bytes']:.3f} x" if part else ""
        lines.append(
            f"{name:18}{value['cpu_seconds']:>12.2f}{value['wall_seconds']:>9.2f}"
            f"{value['peak_bytes'] / 1e6:>10.0f}   {share}"
        )
    again, taken = result["recomputed_cpu_seconds"], timed["chunked+entropy"]["cpu_seconds"]
    lines.append(f"of these the logits computed again in the backward pass: {again:.2f}, {again / taken:.0%}")
    for size, value in result["chunks"].items():
        lines.append(f"chunks of {int(size) / 2**20:.0f} MiB:{value['cpu_seconds']:>15.2f}")
    for name, value in result["full_size"].items():
        verdict = "within" if value["peak_bytes"] <= result["limit_bytes"] else "ABOVE"
        lines.append(
            f"{name} at {sizes['tokens']} tokens: {value['peak_bytes'] / 1e6:.0f} MB above the inputs, "
            f"{verdict} the promised {result['limit_bytes'] / 1e6:.0f} MB"
        )
    apart = ", ".join(f"{k} {v:.1e}" for k, v in result["difference"].items() if k != "tokens")
    lines.append(f"largest relative difference from plain: {apart}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
