"""Tokens per second of the in-process generator over transformers' own `model.generate`, on the same work.

    python benchmarks/generation.py [--json] [--rounds 9]

4 prompts x 8 completions, up to 64 tokens, Qwen2 shape with 3.3 M parameters, float32, one thread. Two cases:
every completion of full length, and lengths with a mean of a quarter of it. The two sides take turns in one
process; figures are medians over the rounds of CPU-seconds per sampled token, so other jobs matter little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _rows import add_device, positive, row
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from hpcgrpo.generation.transformers import TransformersGenerator
from hpcgrpo.types import Request, Sampling

PROMPTS, COMPLETIONS, PROMPT_LENGTH, MAX_LENGTH, VOCABULARY = 4, 8, 6, 64, 512
# an untrained model is nearly uniform, so n end tokens end a row with probability n / 512 at each step
CASES = {"equal lengths": 0, "mean a quarter": 29}


def build() -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=768,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM._from_config(config, attn_implementation="sdpa")


def timed(function: Callable[[int], int], seed: int) -> float:
    """CPU-seconds per sampled token, on a GPU seconds: the tokens are on the host in the end."""
    clock = time.perf_counter if torch.get_default_device().type == "cuda" else time.process_time
    start = clock()
    tokens = function(seed)
    return (clock() - start) / tokens


def measure(end_tokens: int, rounds: int) -> dict[str, float]:
    ends = list(range(100, 100 + end_tokens))
    prompts = torch.randint(
        4, 90, (PROMPTS, PROMPT_LENGTH), generator=torch.Generator(torch.get_default_device()).manual_seed(1)
    )
    theirs, ours = build().eval(), TransformersGenerator(build(), decode=str, eos_token_ids=ends)
    lengths: list[int] = []

    def generate(seed: int) -> int:
        torch.manual_seed(seed)
        ids = prompts.repeat_interleave(COMPLETIONS, 0)
        options = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=MAX_LENGTH, eos_token_id=ends or None, pad_token_id=0
        )
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        completions = out[:, PROMPT_LENGTH:]
        ended = torch.isin(completions, torch.tensor(ends, dtype=torch.int64)).cumsum(1)
        return int((ended.cumsum(1) <= 1).sum())

    def sample(seed: int) -> int:
        rows = [tuple(p) for p in prompts.repeat_interleave(COMPLETIONS, 0).tolist()]
        requests = [Request(p, seed=1000 * seed + i) for i, p in enumerate(rows)]
        done = ours.generate(requests, Sampling(temperature=1.0, max_completion_length=MAX_LENGTH))
        lengths.extend(len(c.token_ids) for c in done)
        return sum(len(c.token_ids) for c in done)

    sides: dict[str, list[float]] = {"transformers": [], "ours": []}
    for turn in range(rounds + 1):
        for name, function in (("transformers", generate), ("ours", sample)):
            seconds = timed(function, turn)
            sides[name] += [seconds] if turn else []  # the first round warms up
    medians = {name: statistics.median(values) for name, values in sides.items()}
    return {
        "ratio": medians["transformers"] / medians["ours"],
        "mean_length": statistics.mean(lengths),
        **{f"{name}_cpu_seconds_per_1000_tokens": 1000 * value for name, value in medians.items()},
    }


def rows(results: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """For `table.py`. No bound: such small models spend most of a decoding step outside of arithmetic."""
    return [
        row(
            f"sampling in process, {name}: model.generate", r["ratio"], of="CPU-seconds a token", promised=1.2
        )
        for name, r in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=positive, default=9)
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        torch.set_default_device(arguments.device)
    torch.set_num_threads(1)
    results = {name: measure(end_tokens, arguments.rounds) for name, end_tokens in CASES.items()}
    if arguments.json:
        print(json.dumps({"rows": rows(results), "cases": results}))
        return
    for name, result in results.items():
        print(f"{name}: {result['ratio']:.2f} x model.generate (mean length {result['mean_length']:.1f})")


if __name__ == "__main__":
    main()
