"""What a run costs before its first step: imports, a model's loading on several ranks, and `hpcgrpo train` itself.

    .venv/bin/python benchmarks/startup.py [--ranks 2] [--repeats 3] [--json]

How to read the output: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _rows import positive, row
from _side import resident_bytes

ROOT = Path(__file__).parents[1]
# The first is what FSDP2 ranks and the optimizer's first step import in any program, the second what a
# transformers model and its tokenizer add.
IMPORTS = {
    "torch, FSDP2, optimizer": "import torch, torch._dynamo, torch.distributed.fsdp",
    "and a transformers model": (
        "import torch, torch._dynamo, torch.distributed.fsdp\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.models.qwen2 import Qwen2ForCausalLM"
    ),
    "a learner rank": (
        "import torch._dynamo, hpcgrpo.train\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "from transformers.models.qwen2 import Qwen2ForCausalLM"
    ),
    "hpcgrpo train, before its ranks": (
        "import hpcgrpo.cli, hpcgrpo.checks, hpcgrpo.launch.local\n"
        "from torch.distributed.launcher.api import LaunchConfig, elastic_launch"
    ),
}
SIZES = {
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
WAYS = ("whole", "shards")
RUN = """
name: startup
model_name_or_path: {folder}/tiny
algorithm: {{name: grpo, num_generations: 4, beta: 0.0}}
rewards: {{accuracy: {{weight: 1.0, require_box_or_tag: false}}}}
data: {{preset: chain, max_samples: 64, options: {{digits: 4}}}}
generation: {{max_prompt_length: 32, max_completion_length: 8}}
train: {{train_batch_size: 8, max_steps: 1, save_steps: 10}}
output_dir: {folder}/logs
device: cpu
report_to: []
"""


def main() -> None:
    options = parse_arguments()
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where installed, prints to stdout
    if options.load:
        print(json.dumps(load(options.load, options.folder)), flush=True)
        os._exit(0)  # a thread of gloo's may still hold a tensor, and Python on its way out aborts below it
    with tempfile.TemporaryDirectory() as folder:
        result = {"settings": vars(options), "imports": imports(options), **loading(options, Path(folder))}
        result["train"] = [first_step(Path(folder)) for _ in range(options.repeats)]
    result["rows"] = rows(result)
    print(json.dumps(result, indent=1) if options.json else as_text(result))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=positive, default=2, help="that load the model together (default 2)")
    parser.add_argument("--repeats", type=positive, default=3, help="measurements of each (default 3)")
    parser.add_argument("--json", action="store_true", help="print every number as JSON, and nothing else")
    parser.add_argument("--load", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- imports


def imports(options: argparse.Namespace) -> dict[str, float]:
    """CPU-seconds of a process that imports and ends, less those of one that only ends; the least of the turns."""
    found = {name: min(cpu_seconds(code) for _ in range(options.repeats)) for name, code in IMPORTS.items()}
    nothing = min(cpu_seconds("pass") for _ in range(options.repeats))
    return {name: seconds - nothing for name, seconds in found.items()}


def cpu_seconds(code: str) -> float:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, code
    return usage.ru_utime + usage.ru_stime


# ---- loading


def loading(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every way in turn, on ranks of their own."""
    parameters = save(folder / "large")
    turns: dict[str, list[list[dict[str, float]]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            turns[way].append(on_ranks(way, folder / "large", options.ranks))
    return {"parameters": parameters, "loading": turns}


def save(folder: Path) -> int:
    """A random model in bfloat16, written in a process of its own, so that this one stays small."""
    code = (
        "import torch, sys, json\nfrom transformers import Qwen2Config, Qwen2ForCausalLM\n"
        "torch.set_default_dtype(torch.bfloat16)\n"
        "model = Qwen2ForCausalLM(Qwen2Config(**json.loads(sys.argv[1])))\n"
        "model.save_pretrained(sys.argv[2])\nprint(model.num_parameters())"
    )
    command = [sys.executable, "-c", code, json.dumps(SIZES), str(folder)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return int(done.stdout)


def on_ranks(way: str, folder: Path, ranks: int) -> list[dict[str, float]]:
    command = [sys.executable, __file__, "--load", way, "--folder", str(folder)]
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(30000 + os.getpid() % 20000),
            },
        )
        for rank in range(ranks)
    ]  # fmt: skip
    answers = [process.communicate(timeout=600)[0] for process in started]
    assert not any(process.returncode for process in started)
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def load(way: str, folder: str) -> dict[str, float]:
    """Load the model on this rank -> time, and the peak of resident memory above what was there before."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.models.qwen2 import Qwen2ForCausalLM  # noqa: F401 - imports are measured apart

    from hpcgrpo.learning import fsdp

    if way == "whole":
        fsdp.find_weights = lambda *_: None
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dist.barrier()
    before = resident_bytes("self", "VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    fsdp.sharded_policy(
        folder, mesh=mesh, device=torch.device("cpu"), dtype=torch.float32, temperature=1.0, chunk_bytes=2**26,
        attn_implementation="packed", gradient_checkpointing=False,
    )  # fmt: skip
    taken = {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    dist.barrier()
    dist.destroy_process_group()
    return {**taken, "peak_bytes": resident_bytes("self") - before}


# ---- a whole start


def first_step(folder: Path) -> dict[str, float]:
    """`hpcgrpo train` with a tiny model on one rank: until its first step's metrics are there, and all its CPU time."""
    if not (folder / "tiny").exists():
        subprocess.run(
            [sys.executable, "-m", "hpcgrpo.cli", "tiny-model", str(folder / "tiny")],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        (folder / "run.yaml").write_text(RUN.format(folder=folder))
    metrics = folder / "logs" / "startup" / "metrics.jsonl"
    begun = time.perf_counter()
    command = [sys.executable, "-m", "hpcgrpo.cli", "train", str(folder / "run.yaml"), "--fresh"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        metrics.unlink(missing_ok=True)
        while process.poll() is None and not metrics.exists():
            time.sleep(0.02)
        wall = time.perf_counter() - begun
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return {"wall_seconds": wall, "cpu_seconds": usage.ru_utime + usage.ru_stime}


# ---- what it says


def worst(turns: Sequence[Sequence[Mapping[str, float]]], name: str) -> float:
    """Of the rank that has most; the median of the turns."""
    return statistics.median(max(rank[name] for rank in turn) for turn in turns)


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    ranks, turns, found = result["settings"]["ranks"], result["loading"], result["imports"]
    memory = worst(turns["whole"], "peak_bytes") / worst(turns["shards"], "peak_bytes")
    held = 4 * result["parameters"] / ranks  # float32 shards, which every rank must hold
    bound = worst(turns["whole"], "peak_bytes") / held
    least, ours = found["and a transformers model"], found["a learner rank"]
    cpu = worst(turns["whole"], "cpu_seconds") / worst(turns["shards"], "cpu_seconds")
    whole = "whole on one rank"
    return [
        row(
            f"loading, fullest rank: {whole}",
            memory,
            of="peak bytes",
            bound=bound,
            bound_is="a rank's float32 shards",
        ),
        row(f"loading, busiest rank: {whole}", cpu, of="CPU-seconds"),
        row(
            "imports of a learner rank: a transformers model's",
            least / ours,
            of="CPU-seconds",
            bound=1.0,
            bound_is="they are among them",
        ),
    ]


def as_text(result: Mapping[str, Any]) -> str:
    lines = ["imports, CPU-seconds"]
    lines += [f"{name:34}{seconds:8.2f}" for name, seconds in result["imports"].items()]
    ranks, size = result["settings"]["ranks"], result["parameters"]
    lines.append(
        f"loading {size / 1e6:.0f} M parameters ({2 * size / 1e6:.0f} MB of bfloat16) on {ranks} ranks, to float32"
    )
    lines.append(f"{'':10}{'peak MB of ranks above the start':>36}{'CPU-seconds':>14}{'wall':>8}")
    for way, turns in result["loading"].items():
        peaks = ", ".join(
            f"{statistics.median(turn[rank]['peak_bytes'] for turn in turns) / 1e6:.0f}"
            for rank in range(ranks)
        )
        lines.append(
            f"{way:10}{peaks:>36}{worst(turns, 'cpu_seconds'):>14.2f}{worst(turns, 'wall_seconds'):>8.2f}"
        )
    wall, cpu = (
        statistics.median(x[f"{clock}_seconds"] for x in result["train"]) for clock in ("wall", "cpu")
    )
    lines.append(
        f"hpcgrpo train, a tiny model: first step after {wall:.1f} s; {cpu:.1f} CPU-seconds to its end"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
