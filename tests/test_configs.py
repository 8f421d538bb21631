"""The shipped configurations are the papers' set-ups, each with the budget that was worked out by hand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo import config
from hpcgrpo.arithmetic import Arithmetic, arithmetic
from hpcgrpo.sections import RunConfig

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
PARTS = sorted((CONFIGS / "base").glob("*.yaml"))  # what runs share; no runs themselves
STUDIES = sorted((CONFIGS / "studies").glob("*.yaml"))
OTHERS = [path for kind in ("eval", "hardware") for path in (CONFIGS / kind).glob("*.yaml")]
RUNS = sorted(set(CONFIGS.rglob("*.yaml")) - set(PARTS) - set(STUDIES) - set(OTHERS))
TAGS = r"\[(S\.2|text|TRL|DAPO|GSPO|code|notes|rep|ours)\]"

# Worked by hand from ALGORITHMS.md 3.5, 3.6, 4.2, 4.4 and 5.5: learner ranks, completions trained per optimizer step,
# questions and completions sampled per step, optimizer steps per step, steps in all.
IGRPO_7B, GRPO_7B = (8, 1024, 256, 2048, 1, 29), (8, 1024, 128, 1024, 1, 58)
IGRPO_14B, GRPO_14B = (32, 1024, 256, 2048, 1, 29), (32, 1024, 128, 1024, 1, 58)
CODISTILL, GRPO_14 = (4, 256, 32, 448, 1, 1872), (4, 448, 32, 448, 1, 1872)  # 7,500 x 8 epochs / 32 questions
EXPECTED = {
    "igrpo_7b": IGRPO_7B,
    "grpo_7b": GRPO_7B,
    "igrpo_14b": (32, 1024, 256, 2048, 1, 367),  # 94,000 questions
    "grpo_14b": (32, 1024, 128, 1024, 1, 734),
    "igrpo/nemotron_h_8b_igrpo": IGRPO_7B,
    "igrpo/nemotron_h_8b_grpo": GRPO_7B,
    "igrpo/openmath_nemotron_7b_igrpo": IGRPO_7B,
    "igrpo/openmath_nemotron_7b_grpo": GRPO_7B,
    "igrpo/r1_distill_14b_igrpo": IGRPO_14B,
    "igrpo/r1_distill_14b_grpo": GRPO_14B,
    "igrpo/openmath_nemotron_14b_igrpo": IGRPO_14B,
    "igrpo/openmath_nemotron_14b_grpo": GRPO_14B,
    "igrpo/openreasoning_nemotron_7b_igrpo": (8, 1024, 256, 2048, 1, 36),  # 9,400 questions
    "igrpo/openreasoning_nemotron_7b_grpo": (8, 1024, 128, 1024, 1, 73),
    "igrpo/r1_distill_7b_dapo": GRPO_7B,
    "igrpo/r1_distill_7b_igrpo_dapo": IGRPO_7B,
    "igrpo/r1_distill_7b_gspo": (8, 256, 128, 1024, 4, 58),  # four mini-batches
    "igrpo/r1_distill_7b_igrpo_gspo": (8, 256, 256, 2048, 4, 29),
    "igrpo/r1_distill_7b_igrpo_judge": IGRPO_7B,
    "cppo/gsm8k_1.5b_grpo": (1, 16, 1, 16, 2, 7473),  # "about 7K rollout steps", twice as many updates
    "cppo/gsm8k_1.5b_cppo": (1, 16, 8, 128, 2, 934),
    "cppo/math_7b_grpo": (3, 48, 3, 48, 2, 2500),  # 7,500 / 3
    "cppo/math_7b_cppo": (3, 48, 24, 384, 2, 312),
    "codistill/qwen2.5_math": CODISTILL,
    "codistill/qwen2.5_math_1.5b_grpo": GRPO_14,
    "codistill/qwen2.5_math_7b_grpo": GRPO_14,
    "codistill/qwen2.5_math_7b_continued": (4, 448, 32, 448, 1, 234),
    "codistill/llama_3": CODISTILL,
    "codistill/llama_3_1b_grpo": GRPO_14,
    "codistill/llama_3_8b_grpo": GRPO_14,
    "codistill/llama_3_8b_continued": (4, 448, 32, 448, 1, 234),
}
# A method and its baseline: the same run but for these.
PAIRS = [
    *((name, name.replace("igrpo", "grpo"), set()) for name in ("igrpo_7b", "igrpo_14b")),
    *((name, name[:-5] + "grpo", set()) for name in EXPECTED if re.match(r"igrpo/.*b_igrpo$", name)),
    ("igrpo/r1_distill_7b_igrpo_dapo", "igrpo/r1_distill_7b_dapo", set()),
    ("igrpo/r1_distill_7b_igrpo_gspo", "igrpo/r1_distill_7b_gspo", set()),
    ("cppo/gsm8k_1.5b_cppo", "cppo/gsm8k_1.5b_grpo", set()),
    ("cppo/math_7b_cppo", "cppo/math_7b_grpo", set()),
    ("codistill/qwen2.5_math", "codistill/qwen2.5_math_1.5b_grpo", {"train", "peer"}),
    ("codistill/qwen2.5_math", "codistill/qwen2.5_math_7b_grpo", {"train", "peer", "model_name_or_path"}),
    ("codistill/llama_3", "codistill/llama_3_1b_grpo", {"train", "peer"}),
    ("codistill/llama_3", "codistill/llama_3_8b_grpo", {"train", "peer", "model_name_or_path"}),
]
FULL_SCALE = [CONFIGS / f"{name}.yaml" for name in EXPECTED]
ROWS = {"gsm8k": 7473, "math": 7500}  # of the training sets
REPORT = """
import json, sys
from hpcgrpo import checks, config
print(json.dumps({path: checks.check(config.load(path)) for path in sys.argv[1:]}))
"""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")  # the judge's run asks for one


def load(name: str, *overrides: str) -> RunConfig:
    return config.load(CONFIGS / f"{name}.yaml", overrides)


def counts(run: RunConfig) -> Arithmetic:
    rows = run.data.max_samples or ROWS[str(run.data.preset)]
    return arithmetic(run, run.build_algorithm(), rows)


def layer(run: RunConfig, name: str) -> dict[str, Any]:
    """The options of an algorithm's layer by its name."""
    options: Any = run.build_algorithm().options
    while options["name"] != name:
        options = options["base"]
    return dict(options)


# ---- runs


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `hpcgrpo check` says of every full-scale run, with neither models, data nor a network."""
    nothing = {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "OPENAI_API_KEY": "none"}
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", REPORT, *(f"configs/{name}.yaml" for name in EXPECTED)],
        capture_output=True, text=True, timeout=300, cwd=ROOT, env=os.environ | nothing | home,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_configuration_loads_and_is_resolved(path: Path) -> None:
    run = config.load(path)
    assert config.load(None, text=config.to_yaml(run)) == run
    full_scale = path.relative_to(CONFIGS).with_suffix("").as_posix() in EXPECTED
    assert full_scale == (run.cluster.gpus_per_node > 0), (
        "every full-scale run has its budget worked out here"
    )


def test_runs_have_names_of_their_own() -> None:
    names = [config.load(path).name for path in RUNS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_full_scale_run_passes_the_check_and_says_what_it_could_not_see(
    name: str, reports: dict[str, Any]
) -> None:
    report, run = reports[f"configs/{name}.yaml"], load(name)
    found = report["counts"]
    ranks, batch, questions, sampled, updates, steps = EXPECTED[name]
    assert (found["ranks"], found["train_batch_size"]) == (ranks, batch)
    assert (found["prompts_per_step"], found["completions_per_step"]) == (questions, sampled)
    assert found["updates_per_step"] == updates
    assert counts(run).max_steps == steps
    said = " ".join(report["not_checked"])
    assert run.model_name_or_path in said and "data: " in said
    hints = "algorithm.hint_tokens 50: 1 of each serve node's engines"  # 3 of the 4 are the small policy's
    assert all(text.startswith(hints) for text in report["warnings"])
    assert len(report["warnings"]) == (run.algorithm["name"] == "codistill")


def test_the_check_of_two_policies_looks_for_both(reports: dict[str, Any]) -> None:
    said = " ".join(reports["configs/codistill/qwen2.5_math.yaml"]["not_checked"])
    assert "Qwen/Qwen2.5-Math-7B" in said and "Qwen/Qwen2.5-Math-1.5B" in said


@pytest.mark.parametrize(("method", "baseline", "besides"), PAIRS)
def test_a_pair_samples_equally_much_and_differs_in_the_algorithm(
    method: str, baseline: str, besides: set[str]
) -> None:
    """Equally many completions of a question, and of all of them over the run but for the last, partial step."""
    a, b = load(method), load(baseline)
    if not method.startswith("cppo"):  # CPPO keeps what is trained per step, and so samples more of it
        per_question = [c.completions_per_step / c.prompts_per_step for c in (counts(a), counts(b))]
        assert per_question[0] == per_question[1] == (14 if "codistill" in method else 8)
    total = [counts(r).max_steps * counts(r).completions_per_step for r in (a, b)]
    assert abs(total[0] - total[1]) <= max(counts(r).completions_per_step for r in (a, b))
    left, right = a.model_dump(), b.model_dump()
    assert {key for key in left if left[key] != right[key]} == {"name", "algorithm", *besides}
    if "train" in besides:
        assert {k for k in left["train"] if left["train"][k] != right["train"][k]} == {"train_batch_size"}


@pytest.mark.parametrize(
    "name", [n for n in EXPECTED if n.startswith("igrpo/") or n.endswith(("_7b", "_14b"))]
)
def test_the_igrpo_papers_hyper_parameters(name: str) -> None:
    """Table S.2 and section 3.6; 14B: five nodes, 4 completions a GPU and pass."""
    run = load(name)
    train, large, gspo = run.train, "14b" in name, "gspo" in name
    assert (run.cluster.nodes, run.cluster.vllm_nodes, run.cluster.gpus_per_node) == (5 if large else 2, 1, 8)
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (
        4 if large else 16,
        2 if gspo else 8,
    )
    assert (train.learning_rate, train.min_lr_rate, train.warmup_ratio) == (1e-6, 0.1, 0.1)
    assert (train.lr_scheduler_type, train.num_train_epochs, train.bf16) == ("cosine_with_min_lr", 1, True)
    assert (run.generation.temperature, run.generation.max_completion_length) == (0.7, 4096)
    assert (run.generation.max_prompt_length, run.generation.vllm_gpu_memory_utilization) == (1024, 0.85)
    assert train.attn_implementation == ("sdpa" if "nemotron_h" in name else "flash_attention_2")
    assert run.data.system_prompt == "igrpo"
    if "judge" not in name:
        weights = {k: v["weight"] if isinstance(v, dict) else v for k, v in run.rewards.items()}
        assert weights == {"accuracy": 1.0, "format": 1.0}
    algorithm = run.build_algorithm()
    assert (algorithm.num_drafts, algorithm.num_generations) in ((4, 4), (0, 8))
    assert algorithm.streams == frozenset(), "beta is 0: no reference model"


def test_the_wrapper_leaves_the_base_as_it_is() -> None:
    for base, options in (
        ("dapo", {"epsilon": 0.2, "epsilon_high": 0.28, "zero_variance": "refill", "loss_agg": "token_mean"}),
        ("gspo", {"epsilon": 3e-4, "epsilon_high": 4e-4}),
    ):
        alone = layer(load(f"igrpo/r1_distill_7b_{base}"), base)
        wrapped = layer(load(f"igrpo/r1_distill_7b_igrpo_{base}"), base)
        assert alone | {"num_generations": 4} == wrapped
        assert {key: alone[key] for key in options} == options


def test_the_judge_stands_in_place_of_the_rules() -> None:
    judged, ruled = load("igrpo/r1_distill_7b_igrpo_judge"), load("igrpo_7b")
    assert list(judged.rewards) == ["judge"] and judged.algorithm == ruled.algorithm


def test_a_hybrid_model_fits_its_8192_tokens() -> None:
    """1024 + 3072 of question and draft, 4096 of completion; the baseline needs 1024 + 4096."""
    assert counts(load("igrpo/nemotron_h_8b_igrpo")).max_model_length == 8192
    assert counts(load("igrpo/nemotron_h_8b_grpo")).max_model_length == 5120


def test_cppos_hyper_parameters() -> None:
    """Section 4.4, and GPUs: 2 for 1.5B, 4 for 7B, of which one samples."""
    for name, gpus, weight in (("gsm8k_1.5b", 2, 1.0), ("math_7b", 4, 2.0)):
        run = load(f"cppo/{name}_cppo")
        base, train = layer(run, "grpo"), run.train
        assert (base["num_generations"], base["epsilon"], base["beta"]) == (16, 0.2, 0.04)
        assert layer(run, "cppo")["pruning_rate"] == 0.875
        assert (train.per_device_train_batch_size, train.num_iterations, train.learning_rate) == (16, 2, 1e-6)
        assert (run.generation.temperature, run.generation.max_completion_length) == (1.0, 1024)
        assert (run.cluster.nodes * run.cluster.gpus_per_node, run.cluster.ranks) == (gpus, gpus - 1)
        assert list(run.rewards.values()) == [weight, 1.0]
        assert run.eval is not None and (run.eval.temperature, run.eval.data.split) == (0.0, "test")


def test_codistills_hyper_parameters() -> None:
    """Section 5.5: 14 sampled, 8 trained, 32 questions a step, context 4096, 8 epochs, hints of 50 in the first."""
    for name in ("qwen2.5_math", "llama_3"):
        run = load(f"codistill/{name}")
        options, algorithm = layer(run, "codistill"), run.build_algorithm()
        assert (options["num_rollouts"], options["num_train"], options["kd_alpha"]) == (14, 8, 1.0)
        assert (algorithm.hint_tokens, algorithm.hint_epochs) == (50, 1)
        assert counts(run).max_model_length == 4096
        assert run.train.num_train_epochs == 8 and run.cluster.nodes * run.cluster.gpus_per_node == 8
        assert run.peer is not None and run.peer.learning_rate == run.train.learning_rate == 1e-6


def test_base_models_get_the_templates_they_lack() -> None:
    from jinja2 import Template

    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    for name, text in (
        ("codistill/qwen2.5_math", "S\nUser: Q\nAssistant:"),
        ("igrpo/nemotron_h_8b_igrpo", "S\n\nQ\n\n"),
    ):
        template = load(name).data.chat_template
        assert template is not None
        assert Template(template).render(messages=messages, add_generation_prompt=True) == text


@pytest.mark.slow
def test_the_hybrids_layers_go_through_the_learners_model() -> None:
    """A tiny nemotron_h: `packed` refuses it, one completion a row gives its own log-probs and reaches every weight."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.nemotron_h import NemotronHConfig

    from hpcgrpo.learning.attention import check_model
    from hpcgrpo.learning.fsdp import PolicyModel
    from hpcgrpo.learning.packing import pack_row
    from hpcgrpo.types import Piece, Row

    settings = NemotronHConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        mamba_num_heads=8, mamba_head_dim=8, n_groups=2, ssm_state_size=8, chunk_size=16,
        hybrid_override_pattern="M-M*-",
    )  # fmt: skip
    with pytest.raises(ValueError, match="state-space layers"):
        check_model(settings)
    attention = load("igrpo/nemotron_h_8b_igrpo").train.attn_implementation
    lm = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
    model = PolicyModel(lm, temperature=0.7, chunk_bytes=2**20, packed_attention=False)
    row = Row(0, (5, 6, 7, 8), (0.0,) * 4, 1.0, 0.25)
    found, _ = model(pack_row((Piece((1, 2, 3), (row,)),), torch.device("cpu")))
    logits = lm(torch.tensor([[1, 2, 3, 5, 6, 7, 8]])).logits[0, 2:6] / 0.7
    torch.testing.assert_close(found, logits.log_softmax(-1)[range(4), [5, 6, 7, 8]])
    found.sum().backward()
    assert all(weight.grad is not None for weight in lm.parameters())


# ---- parts


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.name)
def test_what_runs_share_is_shared(path: Path) -> None:
    assert [p for p in RUNS if re.search(rf"^extends:.*\bbase/{re.escape(path.name)}", p.read_text(), re.M)]


@pytest.mark.parametrize("path", [*PARTS, *FULL_SCALE], ids=lambda path: str(path.relative_to(CONFIGS)))
def test_every_value_says_where_it_is_from(path: Path) -> None:
    for line in path.read_text().splitlines():
        if value := re.match(r" *(?!name:|extends:|#)[\w.]+: *(?!\s*#)(\S.*)", line):
            assert value[1] == "null" or re.search(rf"# .*{TAGS}", line), line


# ---- studies


def study(path: Path) -> Any:
    design = pytest.importorskip("hpcgrpo.study.design")
    return design.load(path)


def by_label(found: Any) -> dict[str, RunConfig]:
    return {found.label(cell): cell.run for cell in found.cells}


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.name)
def test_a_study_is_whole_and_its_published_rows_are_its_own(path: Path) -> None:
    found = study(path)
    assert len(found.labels) >= 2 and found.baseline in found.labels
    for table in found.published:
        assert set(table.rows) <= set(found.labels)


def test_the_ablations_are_the_papers() -> None:
    """Table S.4; CPPO's five rates keep what is trained and what is sampled over an epoch; Tables 4 and 5."""
    beta = by_label(study(CONFIGS / "studies" / "igrpo_beta.yaml"))
    assert [layer(run, "grpo")["beta"] for run in beta.values()] == [0, 1e-4, 1e-3, 1e-2]
    totals = by_label(study(CONFIGS / "studies" / "igrpo_completions.yaml"))
    for label, run in totals.items():
        algorithm, found = run.build_algorithm(), counts(run)
        assert algorithm.num_drafts == algorithm.num_generations == int(label) // 2
        assert (found.train_batch_size, found.prompts_per_step) == (1024, 2048 // int(label))
    for name, rows, trained in (("cppo_gsm8k", 7473, 16), ("cppo_math", 7500, 48)):
        rates = by_label(study(CONFIGS / "studies" / f"{name}.yaml"))
        for kept, run in zip((16, 8, 4, 2, 1), rates.values(), strict=True):
            found = counts(run)
            assert (found.train_batch_size, found.prompts_per_step) == (trained, trained // kept)
            assert 0 <= rows * 16 - found.max_steps * found.completions_per_step < found.completions_per_step
    table_5 = by_label(study(CONFIGS / "studies" / "cppo_allocation.yaml"))
    assert [counts(run).prompts_per_step for run in table_5.values()] == [3, 3, 6]
    table_4 = by_label(study(CONFIGS / "studies" / "cppo_metrics.yaml"))
    assert {layer(run, "cppo")["prune_metric"] for run in table_4.values()} == {
        "smallest", "random", "largest", "smallest_raw", "largest_raw",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["igrpo_split", "igrpo_drafts", "igrpo_entropy", "igrpo_wrapper"])
def test_the_arms_of_a_study_sample_equally_much(name: str) -> None:
    for run in by_label(study(CONFIGS / "studies" / f"{name}.yaml")).values():
        found = counts(run)
        assert found.completions_per_step == 8 * found.prompts_per_step


def test_a_study_and_the_runs_agree() -> None:
    """The arms of Table 2 are the files of Table 2."""
    arms = by_label(study(CONFIGS / "studies" / "igrpo_wrapper.yaml"))
    files = {"GRPO": "grpo_7b", "iGRPO": "igrpo_7b", "DAPO": "igrpo/r1_distill_7b_dapo"}
    files |= {"iGRPO over DAPO": "igrpo/r1_distill_7b_igrpo_dapo", "GSPO": "igrpo/r1_distill_7b_gspo"}
    files |= {"iGRPO over GSPO": "igrpo/r1_distill_7b_igrpo_gspo"}
    for label, name in files.items():
        same = {"name": "", "output_dir": "", "algorithm": {}}
        assert arms[label].build_algorithm().options == load(name).build_algorithm().options
        assert arms[label].model_copy(update=same) == load(name).model_copy(update=same)
