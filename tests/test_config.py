"""Bad input is refused before anything is spent: the key, the value, the rule and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgrpo import config
from hpcgrpo.arithmetic import Arithmetic, arithmetic
from hpcgrpo.config import ConfigError
from hpcgrpo.sections import RunConfig

MINIMAL = """
name: run
model_name_or_path: model
algorithm: {name: grpo, num_generations: 4}
rewards: {accuracy: 1.0}
data: {path: data.jsonl}
train: {per_device_train_batch_size: 8}
"""


def load(*overrides: str, text: str = MINIMAL) -> RunConfig:
    return config.load(None, overrides, text=text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.learing_rate=1", "did you mean learning_rate?"),
        ("clip_ratio_high=0.3", "algorithm.epsilon_high"),
        ("temperature=0.7", "generation.temperature"),
        ("bf16=true", "did you mean train.bf16?"),
        ("generation.temperature=hot", "given: 'hot'"),
        ("train.learning_rate=inf", "train.learning_rate: Input should be a finite number"),
        ("generation.temperature=nan", "generation.temperature: "),
        ("report_to=wandb", "report_to: must be a list, such as [a, b] (given: 'wandb')"),
        ("generation.async_steps=true", "generation.async_steps: true is not a number"),
        ("train.save_total_limit=false", "train.save_total_limit: false is not a number"),
        ("cluster.timeout_min=true", "cluster.timeout_min: true is not a number"),
        ("train.per_device_train_batch_size=6", "nearest that are: 4 and 8"),
        ("train.lr_scheduler_type=cosin", "did you mean cosine?"),
        ("algorithm.name=grop", "did you mean grpo?"),
        ("algorithm.rollout_n=3", "num_generations"),
        ("rewards.acuracy=1", "accuracy"),
        ("name=a/b", "name"),
        ("trust_remote_code=true", "trust_remote_code"),
        ("generation.top_p=0.9", "whole distribution"),
        ("data.path=$HPCGRPO_NOT_SET/x", "HPCGRPO_NOT_SET is not set"),
        ("train.min_lr_rate=0.1", "cosine_with_min_lr"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(override)
    assert said in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_wrappers_refuse_what_makes_no_sense() -> None:
    for algorithm, said in (
        ("{name: cppo, pruning_rate: 1.0}", "pruning_rate"),
        ("{name: igrpo, drafts: 0}", "drafts"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(text=MINIMAL.replace("{name: grpo, num_generations: 4}", algorithm))


def test_duplicate_keys_and_broken_yaml_are_refused() -> None:
    with pytest.raises(ConfigError, match="duplicate"):
        load(text=MINIMAL + "name: again\n")
    with pytest.raises(ConfigError):
        load(text="a: [1,\nb: 2")
    with pytest.raises(ConfigError, match="no mapping"):
        load(text="- 1\n")


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"did you mean .*run\.yaml"):
        config.load(tmp_path / "runs.yaml")


def test_numbers_in_scientific_notation_are_numbers() -> None:
    assert load("train.learning_rate=1e-6").train.learning_rate == 1e-6


def test_the_resolved_yaml_loads_to_the_same_run() -> None:
    run = load("train.max_steps=7", "algorithm.beta=1e-3")
    assert config.load(None, text=config.to_yaml(run)) == run


def test_environment_variables_stand_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCGRPO_DATA", "/data")
    assert load("data.path=$HPCGRPO_DATA/x.jsonl").data.path == "/data/x.jsonl"


# ---- extends


def write(folder: Path, **texts: str) -> Path:
    """Files `name.yaml` of a folder; the last one's path."""
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{list(texts)[-1]}.yaml"


def test_a_file_extends_another_section_by_section(tmp_path: Path) -> None:
    """Sections mix key by key, inner ones too; algorithm, rewards and options are replaced as a whole."""
    base = MINIMAL.replace("{path: data.jsonl}", "{preset: chain, options: {digits: 8}, seed: 3}")
    base += "generation: {temperature: 0.7}\neval: {data: {preset: chain, max_samples: 9}, every_steps: 5}\n"
    over = """
extends: base.yaml
name: over
algorithm: {name: igrpo, drafts: 2, base: {name: grpo, num_generations: 2}}
rewards: {format: 0.5}
data: {options: {size: 4}}
train: {max_steps: 7}
eval: {data: {max_samples: 11}}
"""
    path = write(
        tmp_path, base=base.replace("num_generations: 4", "num_generations: 4, beta: 0.1"), over=over
    )
    run = config.load(path, ["train.per_device_train_batch_size=4"])
    assert (run.name, run.model_name_or_path, run.generation.temperature) == ("over", "model", 0.7)
    assert run.algorithm == {"name": "igrpo", "drafts": 2, "base": {"name": "grpo", "num_generations": 2}}
    assert run.rewards == {"format": 0.5}
    assert (run.data.preset, run.data.seed, run.data.options) == ("chain", 3, {"size": 4})
    assert (run.train.max_steps, run.train.per_device_train_batch_size) == (7, 4)
    assert run.eval is not None
    assert (run.eval.every_steps, run.eval.data.preset, run.eval.data.max_samples) == (5, "chain", 11)


def test_of_several_the_later_wins_and_chains_are_relative_to_each_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, root=MINIMAL + "seed: 1\noutput_dir: a\n")
    write(tmp_path / "deep", one="extends: ../root.yaml\nseed: 2\n", two="seed: 3\noutput_dir: b\n")
    path = write(tmp_path, run="extends: [deep/one.yaml, deep/two.yaml]\nname: last\n")
    run = config.load(path)
    assert (run.name, run.seed, run.output_dir) == ("last", 3, "b")
    assert config.load(write(tmp_path, other="extends: [deep/two.yaml, deep/one.yaml]")).seed == 2


def test_null_is_the_default_again(tmp_path: Path) -> None:
    base = MINIMAL + "generation: {temperature: 0.7, max_prompt_length: 9}\nseed: 5\n"
    base += "train: {per_device_train_batch_size: 8, max_steps: 3}\n"
    base = base.replace("train: {per_device_train_batch_size: 8}\n", "")
    over = "extends: base.yaml\ngeneration: {temperature: null}\nseed: null\ntrain: {max_steps: null}\n"
    run = config.load(write(tmp_path, base=base, over=over))
    assert (run.generation.temperature, run.generation.max_prompt_length) == (1.0, 9)
    assert (run.seed, run.train.max_steps, run.train.per_device_train_batch_size) == (0, None, 8)
    whole = config.load(write(tmp_path, base=base, over="extends: base.yaml\ngeneration: null\n"))
    assert whole.generation == config.load(tmp_path / "base.yaml", ["generation=null"]).generation
    assert whole.generation.max_prompt_length == 512
    kept = config.load(
        write(tmp_path, base=base, over="extends: base.yaml\ntrain: {save_total_limit: null}\n")
    )
    assert kept.train.save_total_limit is None  # here null is a value: keep all
    with pytest.raises(ConfigError, match=r"over\.yaml: name: required, but missing"):
        config.load(write(tmp_path, base=base, over="extends: base.yaml\nname: null\n"))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            {"a": "extends: b.yaml", "b": "extends: c.yaml", "c": "extends: b.yaml"},
            "b.yaml -> c.yaml -> b.yaml",
        ),
        ({"a": "extends: a.yaml"}, "a.yaml -> a.yaml: a file cannot extend itself"),
        ({"bases": MINIMAL, "a": "extends: base.yaml"}, "no such configuration file; did you mean"),
        ({"a": "extends: 3"}, "must be a file's name or a list of them"),
        ({"a": "extends: [b.yaml, 4]"}, "must be a file's name or a list of them"),
        ({"b": "x: [1,", "a": "extends: b.yaml"}, "b.yaml: while parsing"),
        ({"b": "- 1", "a": "extends: b.yaml"}, "b.yaml: holds no mapping"),
        ({"a": "extends: $HPCGRPO_NOT_SET/b.yaml"}, "HPCGRPO_NOT_SET is not set"),
    ],
)
def test_a_wrong_extends_names_the_files(texts: dict[str, str], said: str, tmp_path: Path) -> None:
    write(tmp_path, **texts)
    with pytest.raises(ConfigError) as caught:
        config.load(tmp_path / "a.yaml")
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value) or "NOT_SET" in said


def test_a_mistake_names_the_file_it_stands_in(tmp_path: Path) -> None:
    """Of a key that two files say, the one whose value counts; what the command line says, the file asked for."""
    base = MINIMAL.replace("train: {", "train: {learing_rate: 1.0, ").replace("name: grpo", "name: grop")
    path = write(tmp_path, base=base, over="extends: base.yaml\ngeneration: {temperature: hot}\n")
    with pytest.raises(ConfigError) as caught:
        config.load(path, ["seed=x"])
    lines = {line.partition(": ")[2].partition(":")[0]: line for line in str(caught.value).splitlines()}
    assert lines["train.learing_rate"].startswith(f"{tmp_path / 'base.yaml'}: ")
    assert lines["generation.temperature"].startswith(f"{path}: ")
    assert lines["seed"].startswith(f"{path}: ")
    write(tmp_path, base=base.replace("learing_rate: 1.0, ", ""), over="extends: base.yaml\n")
    with pytest.raises(ConfigError, match=r"base\.yaml: algorithm: .*grpo"):
        config.load(path)
    with pytest.raises(ConfigError, match=r"over\.yaml: algorithm: .*grpo"):
        config.load(path, ["algorithm.num_generations=8"])
    with pytest.raises(ConfigError, match="extends: unknown key; here it is a key of files alone"):
        load("extends=base.yaml")


def test_the_raw_tree_is_neither_expanded_nor_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a study takes as its base: overrides and environment come later."""
    base = MINIMAL.replace("data.jsonl", "$HPCGRPO_DATA/x.jsonl") + 'seed: 4\noutput_dir: "logs/${seed}"\n'
    path = write(tmp_path, base=base, over="extends: base.yaml\nseed: 6\nunknown: 1\n")
    tree = config.read_tree(path)
    assert (tree["data"], tree["output_dir"]) == ({"path": "$HPCGRPO_DATA/x.jsonl"}, "logs/${seed}")
    assert "extends" not in tree and tree["unknown"] == 1
    monkeypatch.setenv("HPCGRPO_DATA", "/data")
    run = config.load(write(tmp_path, over="extends: base.yaml\nseed: 6\n"), ["seed=7"])
    assert (run.data.path, run.output_dir) == ("/data/x.jsonl", "logs/7")
    assert "extends" not in config.to_yaml(run)


# ---- arithmetic


def counts(*overrides: str, rows: int | None = 7500, text: str = MINIMAL) -> Arithmetic:
    run = load(*overrides, text=text)
    return arithmetic(run, run.build_algorithm(), rows)


PAPER = MINIMAL.replace(
    "{per_device_train_batch_size: 8}", "{per_device_train_batch_size: 16, gradient_accumulation_steps: 8}"
)


def test_the_papers_batches_iGRPO_table_S2() -> None:
    """16 x 8 x 8 GPUs = 1024 completions a step: 256 prompts at G = 4, 128 at G = 8; 29 and 58 steps of MATH."""
    cluster = (
        "cluster.nodes=2",
        "cluster.vllm_nodes=1",
        "cluster.gpus_per_node=8",
        "generation.backend=vllm",
    )
    igrpo = PAPER.replace(
        "{name: grpo, num_generations: 4}", "{name: igrpo, drafts: 4, base: {name: grpo, num_generations: 4}}"
    )
    found = counts(*cluster, text=igrpo)
    assert (found.ranks, found.train_batch_size, found.prompts_per_step) == (8, 1024, 256)
    assert (found.completions_per_step, found.max_steps) == (256 * 8, 29)
    grpo = counts(*cluster, "algorithm.num_generations=8", text=PAPER)
    assert (grpo.prompts_per_step, grpo.completions_per_step, grpo.max_steps) == (128, 1024, 58)


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 16), (0.5, 8), (0.75, 4), (0.875, 2), (0.9375, 1)])
def test_cppo_allocation_keeps_the_trained_completions_constant(rate: float, kept: int) -> None:
    """ALGORITHMS 4.2: questions per step B G / k, rollouts per epoch unchanged."""
    text = MINIMAL.replace(
        "{name: grpo, num_generations: 4}",
        f"{{name: cppo, pruning_rate: {rate}, base: {{name: grpo, num_generations: 16}}}}",
    )
    found = counts("train.per_device_train_batch_size=32", text=text, rows=6400)
    assert found.train_batch_size == 32
    assert found.prompts_per_step == 32 // kept
    assert found.completions_per_step == 16 * 32 // kept
    assert found.max_steps * found.completions_per_step == 6400 * 16


def test_a_global_batch_is_independent_of_the_ranks() -> None:
    for ranks in (1, 2, 4):
        text = MINIMAL.replace("{per_device_train_batch_size: 8}", "{train_batch_size: 16}")
        found = counts(f"cluster.nproc_per_node={ranks}", text=text)
        assert (found.prompts_per_step, found.rows_per_device) == (4, 16 // ranks)


def test_minibatches_and_iterations_multiply_the_optimizer_steps() -> None:
    found = counts("train.generation_batch_size=32", "train.num_iterations=2")
    assert (found.prompts_per_step, found.updates_per_step) == (8, 8)
    assert counts("train.steps_per_generation=4").generation_batch_size == 32


def test_too_little_data_is_refused_with_the_largest_batch_that_fits() -> None:
    with pytest.raises(ValueError, match="1 questions, but one step takes 2"):
        counts(rows=1)


def test_an_override_that_is_a_mapping_replaces_the_whole() -> None:
    run = load("algorithm={name: igrpo, drafts: 2, base: {name: grpo, num_generations: 4}}")
    assert run.algorithm == {"name": "igrpo", "drafts": 2, "base": {"name": "grpo", "num_generations": 4}}


def test_a_studys_file_is_told_from_a_runs() -> None:
    with pytest.raises(ConfigError, match=r"describes a study .* use hpcgrpo study"):
        config.load(Path(__file__).parents[1] / "configs" / "studies" / "smoke.yaml")
