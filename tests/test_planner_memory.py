"""The planner's memory: shapes, the closed form against counts of the real code, real memory on a CPU, refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo.config import load
from hpcgrpo.planner import memory, refusals, serving_memory, shapes
from hpcgrpo.planner.memory import Machine, Rows
from hpcgrpo.planner.shapes import Shape
from hpcgrpo.pretrained import Pretrained
from hpcgrpo.sections import RunConfig

ROOT = Path(__file__).parents[1]
TABLE = json.loads((ROOT / "hpcgrpo" / "data" / "traced.json").read_text())
PROGRAM = ROOT / "tests" / "programs" / "learner_memory.py"
GB = 10**9


def run(name: str, **sections: dict[str, Any]) -> RunConfig:
    config = load(ROOT / "configs" / f"{name}.yaml")
    parts = {key: getattr(config, key).model_copy(update=changed) for key, changed in sections.items()}
    return config.model_copy(update=parts)


SEVEN = shapes.find("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", offline=True)
FOURTEEN = shapes.find("nvidia/OpenMath-Nemotron-14B", offline=True)


# --- shapes ---


@pytest.mark.parametrize("name", shapes._table()["models"])
def test_parameters_by_the_formula_are_those_of_the_published_weights(name: str) -> None:
    shape = shapes.known(name)
    assert shape is not None
    if shape.kind == "dense":
        assert shapes._with_parameters(shape).parameters == shape.parameters


def test_a_small_model_counted_by_hand() -> None:
    config = {
        "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 10, "tie_word_embeddings": False,
    }  # fmt: skip
    shape = shapes.of(Pretrained("m", None, config))
    # queries and output 2 x 64, keys and values 2 x 8 x 4, three of 8 x 16; biases 8 + 4 + 4, norms 16
    assert shape.linear_parameters == 128 + 64 + 384 and shape.layer_parameters == 576 + 16 + 16
    assert shape.parameters == 2 * 608 + 2 * 80 + 8
    # a token over 5 others: 2 a multiplication; scores and sums 4 x 5 x 8 a layer; logits 2 x 80
    assert shape.flops_per_token(5) == 2 * (2 * 576 + 160) + 160
    assert shape.kv_bytes_per_token() == 2 * 2 * 4 * 2
    assert shapes.of(Pretrained("m", None, {**config, "tie_word_embeddings": True})).parameters == 1384 - 80


def test_what_is_not_known_is_said() -> None:
    hybrid = shapes.known("nvidia/Nemotron-H-8B-Base-8K")
    assert hybrid is not None and "nemotron_h" in hybrid.kind and hybrid.parameters == 8_100_852_736
    with pytest.raises(ValueError, match="cannot be planned"):
        memory.learner(run("grpo_7b"), hybrid)
    with pytest.raises(ValueError, match="hf download"):
        shapes.of(Pretrained("nobody/knows", None))
    assert shapes.known("nobody/knows") is None


# --- the closed form ---


def test_the_states_by_hand() -> None:
    """Masters 4, moments 8, gradients 4 bytes a parameter over 8 ranks."""
    found = memory.learner(run("grpo_7b"), SEVEN)
    assert found.parts["weights"] == 4 * 7_615_616_512 // 8
    assert found.static_bytes == pytest.approx(16 * 7_615_616_512 / 8, rel=1e-6)
    assert sum(found.parts.values()) == found.peak_bytes == max(found.phases.values())


@pytest.mark.parametrize("entry", TABLE, ids=lambda e: f"{e['model'].split('/')[1]}-{e['ranks']}-{e['rows']}")
def test_closed_form_within_five_percent_of_the_trace(entry: dict[str, Any]) -> None:
    shape = shapes.known(entry["model"])
    assert shape is not None
    machine = Machine(entry["ranks"], entry["item_bytes"], entry["checkpointing"], entry["chunk_bytes"])
    closed = memory.policy(shape, Rows(*entry["rows"]), machine, reference=entry.get("reference", False))
    assert closed.peak_bytes == pytest.approx(entry["peak_bytes"], rel=0.05)


def test_the_table_is_wide() -> None:
    others = [e for e in TABLE if e["model"] not in (SEVEN.name, FOURTEEN.name)]
    assert len(others) >= 12 and len({e["model"] for e in TABLE}) >= 5
    assert {e["checkpointing"] for e in TABLE} == {True, False} and len({e["ranks"] for e in TABLE}) >= 5
    assert any(e["model"] == FOURTEEN.name for e in TABLE) and any(e["model"] == SEVEN.name for e in TABLE)


@pytest.mark.long
@pytest.mark.slow
def test_the_table_is_what_the_code_allocates_now() -> None:
    from hpcgrpo.planner import trace

    entry = next(e for e in TABLE if e["model"].endswith("SmolLM2-135M-Instruct") and e["item_bytes"] == 2)
    shape = shapes.known(entry["model"])
    assert shape is not None
    machine = Machine(entry["ranks"], 2, entry["checkpointing"], entry["chunk_bytes"])
    counted = trace.count(shape, Rows(*entry["rows"]), machine)
    assert counted.peak_bytes == pytest.approx(entry["peak_bytes"], rel=1e-3)


@pytest.mark.slow
def test_a_trace_of_14b_takes_less_than_a_minute_and_gives_the_tables_count() -> None:
    """Of CPU time, start of Python included: the clock of a shared machine tells little."""
    code = (
        "import sys, time; from hpcgrpo.config import load; from hpcgrpo.planner import shapes, trace\n"
        "config = load('configs/grpo_14b.yaml'); shape = shapes.known(config.model_name_or_path)\n"
        "print(trace.learner(config, shape).peak_bytes, time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    peak, seconds = map(float, done.stdout.split())
    entry = next(e for e in TABLE if e["model"] == FOURTEEN.name)
    assert seconds < 60 and peak == pytest.approx(entry["peak_bytes"], rel=0.05)


def test_the_papers_figure_under_the_original_stack() -> None:
    short = {"max_completion_length": 2048}  # Table S.3's
    grpo, igrpo = (
        memory.learner(run(name, generation=short), SEVEN, stack=memory.ORIGINAL)
        for name in ("grpo_7b", "igrpo_7b")
    )
    assert grpo.peak_gb == pytest.approx(54.9286, rel=0.10)
    assert abs(igrpo.peak_gb - grpo.peak_gb) < 0.1
    # bfloat16 logits of 16 x 2048 tokens, three times over
    assert grpo.parts["logits"] == 3 * 2 * 16 * 2048 * 152_064
    wider = replace(memory.ORIGINAL, prompt_width=181)
    more = memory.learner(run("grpo_7b", generation=short), SEVEN, stack=wider)
    assert (more.peak_bytes - grpo.peak_bytes) / 1e6 == pytest.approx(3.7, abs=0.2)  # a prompt token


def test_chunked_logits_and_packing_need_less_than_the_original() -> None:
    config = run("grpo_7b", generation={"max_completion_length": 2048})
    original = memory.learner(config, SEVEN, stack=memory.ORIGINAL)
    assert memory.learner(config, SEVEN).peak_bytes < 0.6 * original.peak_bytes


def test_what_lowers_the_peak() -> None:
    base = memory.learner(run("grpo_7b"), SEVEN).peak_bytes
    assert memory.learner(run("grpo_7b", cluster={"nodes": 3}), SEVEN).peak_bytes < base
    assert memory.learner(run("grpo_7b", train={"max_tokens_per_device": 8192}), SEVEN).peak_bytes < base
    assert (
        memory.learner(run("grpo_7b", train={"gradient_checkpointing": False}), SEVEN).peak_bytes > 2 * base
    )


def test_rows_fill_the_budget() -> None:
    rows = memory.longest_rows(run("grpo_7b"), run("grpo_7b").build_algorithm())
    assert 0.95 * 16384 < rows.tokens <= 16384 and rows.passes > 1 and rows.length <= 4096
    alone = run("grpo_7b", train={"attn_implementation": "sdpa"})
    rows = memory.longest_rows(alone, alone.build_algorithm())
    assert (rows.completions, rows.groups, rows.tokens) == (1, 1, 1024 + 4095)


def test_a_reference_and_a_peer_are_counted() -> None:
    with_reference = run("cppo/math_7b_cppo")
    shape = shapes.known(with_reference.model_name_or_path)
    assert shape is not None
    # a third of the masters
    assert memory.learner(with_reference, shape).parts["reference model"] == 4 * shape.parameters // 3
    two = run("codistill/llama_3")
    assert two.peer is not None
    small, large = (shapes.known(name) for name in (two.model_name_or_path, two.peer.model_name_or_path))
    assert small is not None and large is not None
    found = memory.learner(two, small, peer=large)
    assert found.parts["Adam"] == 8 * large.parameters // 4  # the large one's update is the fullest
    assert found.parts["second policy"] == 12 * small.parameters // 4


# --- vLLM's side ---


def test_the_cache_by_hand() -> None:
    config = run("grpo_7b")
    found = serving_memory.server(config, SEVEN, 80 * GB)
    assert found.weight_bytes == 2 * 7_615_616_512
    each = 2 * 28 * 4 * 128 * 2  # bytes of a token's keys and values
    assert found.blocks == found.cache_bytes // (16 * each) and found.cache_tokens == 16 * found.blocks
    assert found.longest_tokens == 5120 and found.longest_sequences == found.blocks // 320
    assert found.weight_bytes + found.workspace_bytes + found.cache_bytes == int(0.85 * 80 * GB)
    split = serving_memory.server(run("grpo_7b", generation={"vllm_tensor_parallel_size": 2}), SEVEN, 80 * GB)
    assert (
        split.weight_bytes * 2 == found.weight_bytes and split.longest_sequences > 2 * found.longest_sequences
    )


# --- refusals ---


def ways(text: str) -> list[str]:
    return text.split("What fits: ")[1].split("; ")


def test_what_fits_is_not_refused() -> None:
    assert refusals.refusal(run("grpo_7b"), SEVEN, 80 * GB) is None
    assert refusals.refusal(run("igrpo_14b"), FOURTEEN, 80 * GB) is None


@pytest.mark.parametrize(
    "name, shape, gb", [("grpo_7b", SEVEN, 24), ("igrpo_14b", FOURTEEN, 24), ("grpo_7b", SEVEN, 16)]
)
def test_a_learner_that_is_too_large_is_refused_with_ways_out_that_fit(
    name: str, shape: Shape, gb: int
) -> None:
    config = run(name)
    said = refusals.refusal(config, shape, gb * GB)
    assert said is not None and "largest part" in said and len(ways(said)) >= 3
    for way in ways(said):
        if "=" in way:
            assert memory.learner(changed(config, way), shape).needed_bytes <= gb * GB, way


def test_a_smaller_model_is_a_way_out_of_states_and_not_of_activations() -> None:
    """Activations follow the tokens of a micro-batch, so that a model with fewer parameters may not fit either."""
    alone = run(
        "grpo_7b", cluster={"nproc_per_node": 1}
    )  # 8 bytes of each of 7.6 G parameters in Adam's moments
    states = refusals.refusal(alone, SEVEN, 80 * GB)
    assert states is not None and "the largest part is the Adam, 60.9 GB" in states
    assert ways(states)[-1].startswith("a model of at most")
    long = run("grpo_7b", train={"max_tokens_per_device": 65536, "gradient_checkpointing": False})
    activations = refusals.refusal(long, SEVEN, 80 * GB)
    assert activations is not None and "the largest part is the activations" in activations
    assert "a model of" not in activations and len(ways(activations)) >= 3


def test_the_hint_for_an_unknown_model_names_only_models_that_can_be_planned() -> None:
    with pytest.raises(ValueError, match=r"nobody/knows: .* in no table") as error:
        shapes.at_hand(Pretrained("nobody/knows", None))
    named = str(error.value).split("name one of ")[1].split(", ")
    assert len(named) >= 10 and all((shape := shapes.known(n)) and shape.kind == "dense" for n in named)


def changed(config: RunConfig, way: str) -> RunConfig:
    for setting in way.split():
        key, value = setting.split("=")
        section, name = key.split(".")
        update = {name: json.loads(value)}
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=update)})
    return config


def test_a_server_that_is_too_small_is_refused_with_ways_out_that_fit() -> None:
    config = run("igrpo_14b")
    for gb in (40, 36):
        said = serving_memory.refusal(config, FOURTEEN, gb * GB)
        assert said is not None and len(ways(said)) >= 3
        for way in ways(said):
            if "=" in way:
                assert serving_memory.server(changed(config, way), FOURTEEN, gb * GB).longest_sequences, way
    assert refusals.refusal(config, FOURTEEN, 40 * GB) == serving_memory.refusal(config, FOURTEEN, 40 * GB)
    roomy = run("quickstart")
    assert serving_memory.refusal(roomy, FOURTEEN, GB) is None  # no vLLM


def test_what_is_far_too_large_has_three_ways_out_together() -> None:
    config = run("igrpo_7b", generation={"max_completion_length": 200_000, "max_prompt_length": 200_000})
    said = refusals.refusal(config, SEVEN, 85 * GB)
    assert said is not None and len(ways(said)) == 3
    for way in ways(said):
        assert memory.learner(changed(config, way), SEVEN).needed_bytes <= 85 * GB, way
    hopeless = run("grpo_7b", generation={"max_completion_length": 2**30, "max_prompt_length": 2**30})
    assert "Nothing that was tried fits" in str(refusals.refusal(hopeless, SEVEN, 24 * GB))


# --- no torch, and in time ---


def test_it_answers_without_torch() -> None:
    code = (
        "import sys; from hpcgrpo.planner import memory, refusals, serving_memory, shapes\n"
        "from hpcgrpo.config import load\n"
        "config = load('configs/igrpo_14b.yaml'); shape = shapes.known(config.model_name_or_path)\n"
        "refusals.refusal(config, shape, 10**10); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# --- real memory ---

LARGE: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 16384,
    "tie_word_embeddings": False, "max_position_embeddings": 4096,
}  # fmt: skip
TIED = {**LARGE, "vocab_size": 49152, "num_hidden_layers": 4, "tie_word_embeddings": True}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"shape": LARGE, "rows": [128, 4, 128, 1, 2], "checkpointing": False, "chunk_bytes": 2**24},
        {"shape": LARGE, "rows": [256, 4, 256, 2, 2], "checkpointing": True, "chunk_bytes": 2**24},
        {"shape": TIED, "rows": [64, 4, 64, 1, 1], "checkpointing": True, "chunk_bytes": 2**24},
    ],
    2: [
        {"shape": LARGE, "rows": [256, 4, 192, 1, 2], "checkpointing": False, "chunk_bytes": 2**24},
        {"shape": TIED, "rows": [128, 4, 256, 1, 2], "checkpointing": True, "chunk_bytes": 2**26},
    ],
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("ranks", CASES)
def test_predicted_against_resident_memory(ranks: int, tmp_path: Path) -> None:
    """The kernel's high-water mark, since it is what `profiler` reports on a CPU and what a run is killed by; every
    array of 64 KiB and more has pages of its own, so that what is freed is gone from it."""
    (tmp_path / "cases.json").write_text(json.dumps(CASES[ranks]))
    launch = (
        [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    )
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, *launch, str(PROGRAM), str(tmp_path / "cases.json")],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    for case, found in zip(CASES[ranks], measured, strict=True):
        shape = shapes.of(Pretrained("case", None, case["shape"]))
        machine = Machine(ranks, 4, case["checkpointing"], case["chunk_bytes"])
        predicted = memory.policy(shape, Rows(*case["rows"]), machine).peak_bytes
        print(f"{case['rows']}: predicted {predicted / 1e6:.0f} MB, resident {found / 1e6:.0f} MB")
        assert predicted == pytest.approx(found, rel=0.15), case


ZERO3: list[dict[str, Any]] = [
    {"shape": shape, "rows": rows, "checkpointing": kept, "chunk_bytes": chunk, "bf16": bf16}
    for shape, rows, kept, chunk in (
        (LARGE, [256, 4, 192, 1, 2], False, 2**24),
        (TIED, [128, 4, 256, 1, 2], True, 2**26),
    )
    for bf16 in (False, True)
]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case", ZERO3, ids=lambda c: f"{'tied' if c['shape'] is TIED else 'untied'}-{c['bf16']}"
)
def test_zero3_against_what_its_tensors_hold(case: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed itself on two gloo ranks, a process each case, since it keeps what it made."""
    pytest.importorskip("deepspeed", reason="pip install 'hpcgrpo[deepspeed]'")
    (tmp_path / "cases.json").write_text(json.dumps([case]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         PROGRAM.with_name("zero3_memory.py"), tmp_path / "cases.json"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[")))[0]
    shape = shapes.of(Pretrained("case", None, case["shape"]))
    machine = Machine(2, 2 if case["bf16"] else 4, case["checkpointing"], case["chunk_bytes"], zero3=True)
    predicted = memory.policy(shape, Rows(*case["rows"]), machine).peak_bytes
    print(f"predicted {predicted / 1e6:.0f} MB, counted {found / 1e6:.0f} MB")
    assert predicted == pytest.approx(found, rel=0.10), case
