"""`hpcgrpo check`: what would end a run is found on a login node, in seconds, without torch and without a network."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from runs import write_config

from hpcgrpo import checks, config, models, pretrained, tokenizer
from hpcgrpo.config import ConfigError
from hpcgrpo.planner import prediction, refusals
from hpcgrpo.sections import RunConfig
from hpcgrpo.tasks import Row, build_renderer
from hpcgrpo.tasks.prompts import Renderer

ROOT = Path(__file__).parents[1]
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct"
PAPERS = ("igrpo_7b", "grpo_7b", "igrpo_14b", "grpo_14b")

RUN = """
name: run
model_name_or_path: {model}
algorithm: {{name: igrpo, drafts: 2, refine_template: "{{question}}#{{draft}}#{{question}}",
             base: {{name: grpo, num_generations: 4}}}}
rewards: {{accuracy: {{weight: 1.0, require_box_or_tag: false}}}}
data: {{preset: chain, max_samples: 64, options: {{digits: 4}}}}
generation: {{backend: vllm, max_prompt_length: 32, max_completion_length: 8}}
train: {{train_batch_size: 8, max_steps: 6, save_steps: 2, save_total_limit: 2}}
cluster: {{nodes: 2, vllm_nodes: 1, gpus_per_node: 8, cpus_per_task: 8, nproc_per_node: 1}}
output_dir: {output_dir}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("checks")).parent / "model"


def load(model: Path | str, output_dir: Path, *overrides: str) -> RunConfig:
    return config.load(None, overrides, text=RUN.format(model=model, output_dir=output_dir))


def fake_model(folder: Path, *, layers: int = 2, dtype: str = "F32", **changes: Any) -> Path:
    """A model's folder of which only headers are real: 4 heads of 32, 2 key-value heads; its weights are a hole."""
    folder.mkdir(parents=True)
    shapes = {"model.embed_tokens.weight": [100, 128]}
    for i in range(layers):
        shapes[f"model.layers.{i}.self_attn.q_proj.weight"] = [128, 128]
        shapes[f"model.layers.{i}.self_attn.k_proj.weight"] = [64, 128]
    extra = changes.pop("extra", 0)
    if extra:
        shapes["model.extra.weight"] = [extra]
    size = pretrained.ITEM_BYTES.get(dtype, 1)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)  # sparse: takes no space
    settings = {"vocab_size": 100, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    settings |= {"num_hidden_layers": 2, "max_position_embeddings": 256, "model_type": "qwen2"} | changes
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def command(*arguments: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """`hpcgrpo check` in a process of its own -> the process, and the CPU-seconds of it and its children."""
    line = [sys.executable, "-m", "hpcgrpo.cli", "check", *arguments]
    before = os.times()
    done = subprocess.run(
        line, capture_output=True, text=True, timeout=120, cwd=ROOT, env=os.environ | environment
    )
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return done, spent


# ---- quick


def test_it_answers_within_three_cpu_seconds_and_without_torch(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(model=tiny, output_dir=tmp_path))
    taken = []
    for _ in range(3):
        done, spent = command(str(path), "--json")
        assert done.returncode == 0, done.stderr
        taken.append(spent)
    assert median(taken) < 3, taken
    code = (
        "import sys; from hpcgrpo import checks, config; checks.check(config.load(sys.argv[1]));"
        " print(*{'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


# ---- the same prompts as in the run

TEXTS = (
    "What is 2 + 3?",
    "  spaces,\ttabs\n\n and lines\r\n",
    "naïve café, e\u0301, 你好, 🙂, \u00a0\u2028",
    "<|im_end|><|im_start|>system\nobey<|endoftext|><eos>",
    "12345678, 3.14159 \\frac{1}{2} don't I'LL",
    "",
    "x" * 300,
)


def same(folder: Path, system: str | None = None) -> None:
    """Prompts, ids, refinements and control tokens of the quick way are those of transformers."""
    from transformers import AutoTokenizer

    quick = tokenizer.read(folder, name=str(folder))
    assert quick is not None
    pair = [
        build_renderer(t, system_prompt=system) for t in (quick, AutoTokenizer.from_pretrained(str(folder)))
    ]
    for question in TEXTS:
        assert pair[0].token_ids([question]) == pair[1].token_ids([question])
        row = Row(0, ({"role": "user", "content": question},), {})
        assert pair[0].render(row, 0) == pair[1].render(row, 0)
        for draft in TEXTS:
            assert refined(pair[0], row, draft) == refined(pair[1], row, draft)
    assert pair[0].control_tokens == pair[1].control_tokens
    ids = list(range(100))
    assert pair[0]._decode(ids) == pair[1]._decode(ids)


def refined(renderer: Renderer, row: Row, draft: str) -> Any:
    prompt = renderer.render(row, 0)
    limit = len(prompt.token_ids) + len(renderer.token_ids([row.question])[0]) + 30
    return renderer.refine(prompt, draft, template="{question}\n{draft}", max_length=limit)


def relabelled(folder: Path, source: Path, model: dict[str, Any], **settings: Any) -> Path:
    """A copy of a model's tokenizer under other settings."""
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    given = json.loads((source / "tokenizer_config.json").read_text()) | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def test_the_quick_tokenizer_is_transformers_own(tiny: Path) -> None:
    same(tiny)


@pytest.mark.skipif(not SMOLLM2.exists(), reason="needs models/SmolLM2-135M-Instruct (README)")
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({"model_type": "llama"}, {}),
        ({"model_type": "llama"}, {"tokenizer_class": "PreTrainedTokenizerFast"}),
        ({"model_type": "llama"}, {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}),
        ({"model_type": "qwen2"}, {"tokenizer_class": "LlamaTokenizerFast"}),  # DeepSeek's distilled models
        ({"model_type": "qwen3"}, {"tokenizer_class": "Qwen2Tokenizer"}),
        ({"model_type": "qwen2"}, {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}),
    ],
)
def test_of_a_real_vocabulary_too(model: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    """transformers replaces a qwen2 folder's way of splitting words; so must the quick way."""
    same(relabelled(tmp_path / "model", SMOLLM2, model, **settings), system="r1")


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({"model_type": "mistral"}, {}),
        ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer"}),
        ({"model_type": "qwen2"}, {"auto_map": {"AutoTokenizer": ["x.y", None]}}),
        ({"model_type": "qwen2"}, {"pad_token": "<not there>"}),
        ({"model_type": "qwen2"}, {"image_token": "<image>"}),
    ],
)
def test_what_it_is_not_sure_of_is_left_to_transformers(
    model: dict[str, Any], settings: dict[str, Any], tiny: Path, tmp_path: Path
) -> None:
    assert tokenizer.read(relabelled(tmp_path / "model", tiny, model, **settings), name="x") is None


def test_a_tokenizer_that_only_transformers_reads_is_checked_too(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    settings = json.loads((model / "tokenizer_config.json").read_text()) | {"image_token": "<spare99>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer.read(model, name="x") is None
    one, other = (checks.check(load(m, tmp_path)) for m in (tiny, model))
    assert one["prompts"] == other["prompts"] and one["questions"] == other["questions"]


def test_transformers_still_chooses_the_classes_that_the_quick_way_assumes() -> None:
    from transformers.models.auto import tokenization_auto as auto

    assert "qwen2" in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    for kind in tokenizer.QWEN2_MODELS:
        assert auto.TOKENIZER_MAPPING_NAMES[kind] == "Qwen2Tokenizer"
    for kind in tokenizer.PLAIN_MODELS:
        assert kind not in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS


# ---- nodes, GPUs, heads


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.vllm_nodes=0",), "set cluster.vllm_nodes=1 and cluster.nodes=2"),
        (("cluster.vllm_nodes=2",), "at least one node must learn; set cluster.nodes=3"),
        (("generation.backend=transformers",), "these nodes would idle"),
        (("generation.vllm_tensor_parallel_size=3",), "use one of 1, 2, 4, 8"),
        (("cluster.nproc_per_node=9",), "nproc_per_node is 9"),
        (("cluster.gpus_per_node=0", "generation.vllm_tensor_parallel_size=2"), "set it to 1"),
        (("cluster.gpus_per_node=0", "cluster.slurm_gres=gpu:a100:8"), "gpus_per_node is 0"),
    ],
)
def test_nodes_and_gpus_that_do_not_fit(tmp_path: Path, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("model", tmp_path, *overrides)
    assert said in str(caught.value)


def test_tensor_parallel_size_must_divide_the_heads(tmp_path: Path) -> None:
    """4 heads, 2 key-value heads: 1, 2 and 4 do (2 key-value heads are doubled), 8 does not, though 8 GPUs allow it."""
    model = fake_model(tmp_path / "model")
    for size, per_node in ((1, 8), (2, 4), (4, 2)):
        run = load(model, tmp_path, f"generation.vllm_tensor_parallel_size={size}")
        checks.inputs(run)
        assert models.servers(run) == {"count": per_node, "nodes": 1, "per_node": per_node, "gpus": size}
    with pytest.raises(ConfigError, match="4 attention heads and 2 key-value heads; use one of 1, 2, 4 "):
        checks.inputs(load(model, tmp_path, "generation.vllm_tensor_parallel_size=8"))


CODISTILL = "algorithm={name: codistill, num_rollouts: 6, num_train: 4}"


def test_two_policies_must_have_one_vocabulary(tiny: Path, tmp_path: Path) -> None:
    """The peer's folder with one token renamed: its id is named, with both folders and the way out."""
    peer = shutil.copytree(tiny, tmp_path / "peer")
    keys = [CODISTILL, f"peer={{model_name_or_path: {peer}}}"]
    report = checks.check(load(tiny, tmp_path, *keys))
    assert report["peer"]["parameters"] == report["model"]["parameters"]
    one = checks.check(load(tiny, tmp_path, "algorithm={name: grpo, num_generations: 4}"))
    assert report["checkpoints"]["bytes_each"] == 2 * one["checkpoints"]["bytes_each"]
    path = peer / "tokenizer.json"
    path.write_text(path.read_text().replace('"7":', '"seven":'))
    with pytest.raises(ConfigError, match=r"token '(7|seven)' is .* take two models of one family"):
        checks.inputs(load(tiny, tmp_path, *keys))


def test_a_peer_where_none_belongs_and_none_where_one_does(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="peer: missing, but algorithm codistill trains two policies"):
        load(tiny, tmp_path, CODISTILL)
    with pytest.raises(ConfigError, match="algorithm grpo has no second policy; leave peer out"):
        load(
            tiny,
            tmp_path,
            "algorithm={name: grpo, num_generations: 4}",
            f"peer={{model_name_or_path: {tiny}}}",
        )
    with pytest.raises(ConfigError, match=r"peer.*no such folder"):
        checks.inputs(load(tiny, tmp_path, CODISTILL, "peer={model_name_or_path: ./nowhere}"))
    with pytest.raises(ConfigError, match="hint_tokens"):
        load(
            tiny, tmp_path, "algorithm={name: codistill, num_rollouts: 6, num_train: 4, hint_tokens: 800}",
            f"peer={{model_name_or_path: {tiny}}}",
        )  # fmt: skip


def test_heads_that_a_cpu_does_not_serve(tmp_path: Path) -> None:
    wide = {"head_dim": 32, "hidden_size": 128}
    checks.inputs(load(fake_model(tmp_path / "a", **wide), tmp_path, "cluster.gpus_per_node=0"))
    odd = fake_model(tmp_path / "b", num_attention_heads=2, num_key_value_heads=1, head_dim=64)
    checks.inputs(load(odd, tmp_path, "cluster.gpus_per_node=0"))
    odd = fake_model(tmp_path / "c", num_attention_heads=8, num_key_value_heads=4)  # of 16
    with pytest.raises(ConfigError, match="heads of 16 dimensions"):
        checks.inputs(load(odd, tmp_path, "cluster.gpus_per_node=0"))
    checks.inputs(load(odd, tmp_path))  # a GPU serves them


def test_layers_that_neither_packing_nor_the_in_process_generator_serves(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "a", layer_types=["full_attention", "sliding_attention"], sliding_window=8)
    sdpa, process = "train.attn_implementation=sdpa", "generation.backend=transformers"
    alone = (process, "cluster.nodes=1", "cluster.vllm_nodes=0")
    said = (
        "packed rows cannot serve layers of the type sliding_attention; set train.attn_implementation: sdpa"
    )
    with pytest.raises(ConfigError, match=f"{said}, or take"):
        checks.inputs(load(model, tmp_path))
    with pytest.raises(ConfigError, match=f"{said} and generation.backend: vllm"):
        checks.inputs(load(model, tmp_path, *alone))
    with pytest.raises(
        ConfigError, match=r"in-process generator has no cache .* set generation.backend: vllm"
    ):
        checks.inputs(load(model, tmp_path, sdpa, *alone))
    checks.inputs(load(model, tmp_path, sdpa))


def test_the_second_prompt_counts_for_the_models_length(tmp_path: Path) -> None:
    """Question 32, draft 8, template 64: a refinement prompt of 104 tokens, and a completion of 8 after it: 112."""
    checks.inputs(load(fake_model(tmp_path / "a", max_position_embeddings=112), tmp_path))
    with pytest.raises(ConfigError, match=r"are 112 tokens.*takes 111.*max_refine_prompt_length \(now 104\)"):
        checks.inputs(load(fake_model(tmp_path / "b", max_position_embeddings=111), tmp_path))
    plain = "algorithm={name: grpo, num_generations: 4}"
    checks.inputs(load(fake_model(tmp_path / "c", max_position_embeddings=40), tmp_path, plain))


@pytest.mark.parametrize("key", ["data", "eval.data"])
def test_what_is_wrong_with_the_rows_is_told_with_their_section(tiny: Path, tmp_path: Path, key: str) -> None:
    chain = "{preset: chain, max_samples: 64, options: {digits: true}}"
    changes = f"data={chain}" if key == "data" else f"eval={{data: {chain}}}"
    for way in (checks.inputs, checks.check):
        with pytest.raises(ConfigError, match=rf"^{key}: options\.digits is True; .* takes a whole number$"):
            way(load(tiny, tmp_path, changes))


# ---- weights


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 101}, "embed_tokens.weight is 100 x 128, but by config.json it is 101 x 128"),
        ({"hidden_size": 64, "head_dim": 32}, "100 x 128, but by config.json it is 100 x 64"),
        ({"num_key_value_heads": 4}, "k_proj.weight is 64 x 128, but by config.json it is 128 x 128"),
        ({"num_hidden_layers": 3}, "weights of 2 layers, but config.json says 3"),
    ],
)
def test_weights_of_another_model_are_found(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        checks.inputs(load(fake_model(tmp_path / "model", **changes), tmp_path))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "x"}, "hidden_size is 'x'; it must be a whole number above 0"),
        ({"vocab_size": -4}, "vocab_size is -4; it must be a whole number above 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing; it must be a whole number above 0"),
        ({"rope_parameters": 5}, "rope_parameters is 5; it must be an object, or null"),
        ({"model_type": 7}, "model_type is 7; it must be the name of an architecture"),
        ({"model_type": "foo"}, "model_type is 'foo', which transformers"),
        ({}, "model_type is missing; it must be the name of an architecture"),
        ([], "holds no object of keys and values"),
    ],
)
def test_a_damaged_config_json_is_told_with_its_key_and_value(
    changes: Any, said: str, tmp_path: Path
) -> None:
    path = fake_model(tmp_path / "model") / "config.json"
    if not changes:
        path.write_text(json.dumps(changes))
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    run = load(path.parent, tmp_path)
    ways = [checks.inputs, checks.check]
    if changes != {"model_type": "foo"}:  # which a plan does not ask for
        ways.append(lambda run: prediction.shape_of(run.model_name_or_path))
    for way in ways:
        with pytest.raises(ConfigError) as caught:
            way(run)
        assert f"{path}: {said}" in str(caught.value)


def test_every_type_of_transformers_is_known_by_its_tables() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    for name in CONFIG_MAPPING_NAMES:
        pretrained.check_type(pretrained.Pretrained(name, None, {"model_type": name}))


def test_a_missing_shard_and_a_cut_one_are_found(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "model")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"1 files of its index are missing, such as model-00002"):
        checks.inputs(load(model, tmp_path))
    (model / "model.safetensors.index.json").unlink()
    with (model / "model.safetensors").open("rb+") as file:
        file.truncate(2000)
    with pytest.raises(ConfigError, match=r"model\.safetensors: damaged"):
        checks.inputs(load(model, tmp_path))


# ---- the hub


def test_a_job_without_network_needs_everything_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"not in the hub's cache.*hf download some/model"):
        checks.check(load("some/model", tmp_path))
    data = "data={preset: gsm8k}"
    model = fake_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"openai/gsm8k is not in the hub's cache.*load_dataset\('openai"):
        checks.check(load(model, tmp_path, data))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(ConfigError, match="not in the hub's cache"):  # offline by the job's own lines
        checks.check(load("some/model", tmp_path, 'cluster.slurm_setup=["export HF_HUB_OFFLINE=1"]'))


def test_without_the_cache_it_says_what_it_did_not_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    report = checks.check(load("some/model", tmp_path, "data={preset: gsm8k}"))
    assert [line.split(":")[0] for line in report["not_checked"]] == [
        "data",
        "model_name_or_path",
        "cluster.gpus_per_node",
        "train.save_steps",
    ]
    assert report["questions"] is None and report["counts"]["steps_per_epoch"] is None
    assert (report["counts"]["max_steps"], report["prompts"], report["rewards"]) == (6, {}, [])


def test_rewards_are_called_where_only_the_model_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    report = checks.check(load("some/model", tmp_path))
    assert [r["reward"] for r in report["rewards"]] == [1.0, 0.0]
    assert report["prompts"] == {}


# ---- rewards


def rewards_of(tiny: Path, tmp_path: Path, spec: str) -> dict[str, Any]:
    return checks.check(load(tiny, tmp_path, f"rewards={spec}"))


def test_a_right_and_a_wrong_answer_in_the_form_that_the_rewards_want(tiny: Path, tmp_path: Path) -> None:
    """The papers' accuracy and format, 1.0 each: 2 for the right answer in tags, 1 for a wrong one in tags."""
    report = rewards_of(tiny, tmp_path, "{accuracy: 1.0, format: 1.0}")
    right, wrong = report["rewards"]
    assert right["parts"] == {"accuracy": 1.0, "format": 1.0} and right["reward"] == 2.0
    assert wrong["parts"] == {"accuracy": 0.0, "format": 1.0} and wrong["outcomes"] == {"accuracy": "wrong"}
    assert f"<answer>{report['answer_of_first']}</answer>" in right["text"]
    assert report["warnings"] == []
    cppo = rewards_of(tiny, tmp_path, "{cppo_gsm8k: 1.0, cppo_format: 1.0}")
    assert [r["reward"] for r in cppo["rewards"]] == [3.0, 1.0]


def test_answers_that_only_a_formula_parser_tells_apart(tiny: Path, tmp_path: Path) -> None:
    """Where there is a number among the first answers, that one is taken, since the parser takes seconds to load."""
    lines = ['{"prompt": "1", "answer": "x^2 + 1"}', '{"prompt": "2", "answer": "\\\\sqrt{3}"}'] * 4
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    run = load(tiny, tmp_path, f"data={{path: {path}, shuffle: false}}", "rewards={accuracy: 1.0}")
    report = checks.check(run)
    assert [r["outcomes"]["accuracy"] for r in report["rewards"]] == ["right", "wrong"]
    path.write_text("\n".join([*lines, '{"prompt": "3", "answer": "7"}']))
    report = checks.check(run)
    assert report["answer_of_first"] == "x^2 + 1"
    assert [r["text"].split("answer>")[1] for r in report["rewards"]] == ["7</", "8</"]


def test_a_task_with_gpus_and_one_processor_is_warned_of(tiny: Path, tmp_path: Path) -> None:
    [warning] = checks.check(load(tiny, tmp_path, "cluster.cpus_per_task=null"))["warnings"]
    assert "cluster.cpus_per_task is not set" in warning and "slurm_exclusive=true" in warning


def test_rewards_that_cannot_tell_right_from_wrong_are_warned_of(tiny: Path, tmp_path: Path) -> None:
    assert "a wrong answer scores as much" in rewards_of(tiny, tmp_path, "{format: 1.0}")["warnings"][0]
    prefilled = rewards_of(tiny, tmp_path, "{accuracy: 1, format: {weight: 1, think_in_prompt: true}}")
    assert "set rewards.format.think_in_prompt=false" in prefilled["warnings"][0]


def test_a_users_function_is_called_and_its_error_named(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def loud(completions, answer, **columns):\n"
        "    print('scoring')\n"
        "    return [float(a in c) / 2 for c, a in zip(completions, answer)]\n"
        "def broken(completions, **columns):\n"
        "    return [1 / 0 for _ in completions]\n"
    )
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(model=tiny, output_dir=tmp_path))
    done, _ = command(str(file), f"rewards={{'{path}:loud': 1.0}}", "--json")
    report = json.loads(done.stdout)  # what the function prints does not get in between
    assert report["rewards"][0]["parts"] == {"loud": 0.5}
    done, _ = command(str(file), f"rewards={{'{path}:broken': 1.0}}")
    assert done.returncode == 2
    assert "reward broken raised ZeroDivisionError" in done.stderr and "mine.py, line 5" in done.stderr


def test_a_judge_is_not_called(tiny: Path, tmp_path: Path) -> None:
    judge = "{accuracy: 1.0, judge: {weight: 1.0, base_url: 'http://127.0.0.1:9', model: m}}"
    report = rewards_of(tiny, tmp_path, judge)
    assert report["rewards"][0]["parts"] == {"accuracy": 1.0}
    assert report["not_checked"][0] == "rewards: the judge, which a check does not call"


# ---- disk


def test_a_file_closed_to_this_user_is_told_as_that_and_not_as_damage() -> None:
    """As any user but root, who may read everything: the test takes another user's rights where it is root's."""
    with tempfile.TemporaryDirectory() as place:
        folder = fake_model(Path(place) / "model")
        weights = folder / "model.safetensors"
        weights.chmod(0)
        Path(place).chmod(0o755)
        folder.chmod(0o755)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(
                ConfigError, match=r"model\.safetensors: this user may not read it \(mode 0"
            ) as error:
                pretrained.find(str(folder), offline=True)
        finally:
            os.seteuid(user)
    assert "damaged" not in str(error.value)


SEVEN = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
PLAIN = ("cluster.gpus_per_node=8", "cluster.nproc_per_node=8", "generation.max_completion_length=2048")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (("train.gradient_checkpointing=false", "cluster.slurm_gres=gpu:h100:8"), "activations"),
        (("cluster.nproc_per_node=1", "cluster.slurm_constraint=ib&h100"), "Adam"),
    ],
)
def test_a_learner_that_cannot_fit_is_refused_with_ways_out(
    overrides: tuple[str, ...], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 rank: 16 bytes of each of 7,615,616,512 parameters are 121.8 GB. `submit` asks the same."""
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    settings = (*PLAIN, "train.max_tokens_per_device=65536", "train.train_batch_size=64", *overrides)
    run = load(SEVEN, tmp_path, *settings)
    for asked in (checks.check, checks.inputs):
        with pytest.raises(
            ConfigError, match=rf"GB too large; the largest part is the {part}, .* GB"
        ) as error:
            asked(run)
        key = "slurm_gres gpu:h100:8" if "gres" in overrides[-1] else "slurm_constraint ib&h100"
        assert str(error.value).startswith(f"cluster.{key}: the learner needs")
        assert len(str(error.value).split("What fits: ")[1].split("; ")) >= 3


def test_a_learner_that_fits_is_shown_and_one_at_the_edge_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    run = load(SEVEN, tmp_path, *PLAIN, "cluster.slurm_gres=gpu:nvidia_a100-sxm4-80gb:8")
    report = checks.check(run)
    needed = report["memory"].pop("learner_needed_bytes")
    assert report["memory"] == {"gpu": "a100-80gb", "gpu_memory_bytes": 85 * 10**9}
    assert 16 * 7_615_616_512 / 8 < needed < 85e9
    monkeypatch.setattr(refusals, "DOUBT", 10.0)  # as if what is ten times too large might fit
    edge = load(SEVEN, tmp_path, *PLAIN, "train.gradient_checkpointing=false", "cluster.slurm_gres=gpu:a100:8",
                "train.max_tokens_per_device=65536", "train.train_batch_size=64")  # fmt: skip
    assert any("it may not fit: the learner needs" in text for text in checks.check(edge)["warnings"])


@pytest.mark.parametrize(
    ("model", "overrides", "said"),
    [
        (SEVEN, (), "a learner's needs [0-9.]+ GB, but which GPUs they are is not said"),
        (SEVEN, ("cluster.slurm_constraint=h100_nvl",), "which GPUs they are is not said"),
        ("nobody/knows", ("cluster.slurm_gres=gpu:a100:8",), "its config.json is not here"),
        (
            "nvidia/Nemotron-H-8B-Base-8K",
            ("cluster.slurm_gres=gpu:a100:8",),
            "nemotron_h .* cannot be planned",
        ),
    ],
)
def test_where_model_or_gpu_is_not_known_nothing_is_refused(
    model: str, overrides: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    report = checks.check(load(model, tmp_path, *PLAIN, *overrides))
    assert any(re.search(said, text) for text in report["not_checked"])
    assert report["memory"]["gpu"] is None


def test_the_space_of_checkpoints(tmp_path: Path) -> None:
    """61,952 parameters: 12 bytes of state and 4 of export each (2 in bfloat16); three of 3 saves stand at once."""
    count = 100 * 128 + 2 * (128 * 128 + 64 * 128)
    run = load(fake_model(tmp_path / "model"), tmp_path, "cluster.gpus_per_node=0")
    model = pretrained.find(run.model_name_or_path, offline=False)
    assert model.parameters == count and model.weight_bytes == 4 * count
    counts = config.arithmetic(run, run.build_algorithm(), None)
    space = checks.disk(run, model, None, counts)
    assert space is not None and space["bytes_each"] == 16 * count
    assert space["at_once"] == 3 and space["bytes_needed"] == 48 * count
    on_gpus = checks.disk(load(tmp_path / "model", tmp_path), model, None, counts)
    assert on_gpus is not None and on_gpus["bytes_each"] == 14 * count


def test_a_disk_on_which_checkpoints_do_not_fit(tiny: Path, tmp_path: Path) -> None:
    """Files that are holes stand for models whose checkpoint takes twice, and half, of what is free here."""
    free = shutil.disk_usage(tmp_path).free
    large = fake_model(tmp_path / "large", dtype="U8", extra=2 * free // 14)
    with pytest.raises(ConfigError, match=r"output_dir .*: a checkpoint takes .* are free there"):
        checks.inputs(load(large, tmp_path))
    middling = fake_model(tmp_path / "middling", dtype="U8", extra=free // 14 // 2)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny / name, middling / name)
    report = checks.check(load(middling, tmp_path))
    assert "3 checkpoints stand there at once" in report["warnings"][0]


# ---- the papers' set-ups


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_configurations_pass_without_model_data_and_network(name: str, tmp_path: Path) -> None:
    done, spent = command(
        f"configs/{name}.yaml", "--json", HF_HUB_OFFLINE="0", HF_HOME=str(tmp_path), HF_DATASETS_OFFLINE="0"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    large, igrpo = name.endswith("14b"), name.startswith("igrpo")
    assert report["counts"]["train_batch_size"] == 1024
    assert report["counts"]["ranks"] == (32 if large else 8)
    assert report["counts"]["rows_per_device"] == (4 if large else 16)
    assert report["counts"]["prompts_per_step"] == (256 if igrpo else 128)
    assert report["counts"]["max_steps"] == {True: (29, 58), False: (367, 734)}[not large][not igrpo]
    assert report["counts"]["max_model_length"] == (1024 + 4096 + 64 if igrpo else 1024) + 4096
    assert report["servers"] == {"count": 8, "nodes": 1, "per_node": 8, "gpus": 1}
    assert len(report["not_checked"]) == 4 and spent < 3


def test_the_papers_values() -> None:
    """iGRPO Table S.2 and sections 3.6 and 3.7 of the specification; the baseline differs in the algorithm alone."""
    for size, nodes, per_device in (("7b", 2, 16), ("14b", 5, 4)):
        igrpo, grpo = (config.load(ROOT / "configs" / f"{a}_{size}.yaml") for a in ("igrpo", "grpo"))
        assert grpo.model_copy(update={"name": igrpo.name, "algorithm": igrpo.algorithm}) == igrpo
        options = igrpo.build_algorithm().options
        assert (options["drafts"], options["base"]["num_generations"], options["base"]["beta"]) == (4, 4, 0)
        assert grpo.build_algorithm().options["num_generations"] == 8
        train, sampling = igrpo.train, igrpo.generation
        assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (per_device, 8)
        assert (train.learning_rate, train.lr_scheduler_type, train.min_lr_rate, train.warmup_ratio) == (
            1e-6,
            "cosine_with_min_lr",
            0.1,
            0.1,
        )
        assert train.bf16 and train.gradient_checkpointing and train.num_train_epochs == 1
        assert train.attn_implementation == "flash_attention_2"
        assert (sampling.backend, sampling.temperature, sampling.vllm_gpu_memory_utilization) == (
            "vllm",
            0.7,
            0.85,
        )
        assert (sampling.max_prompt_length, sampling.max_completion_length) == (1024, 4096)
        assert (igrpo.cluster.nodes, igrpo.cluster.vllm_nodes, igrpo.cluster.gpus_per_node) == (nodes, 1, 8)
        weights = {k: v["weight"] if isinstance(v, dict) else v for k, v in igrpo.rewards.items()}
        assert weights == {"accuracy": 1.0, "format": 1.0}
        assert igrpo.data.preset == ("math" if size == "7b" else "openr1_math_220k")


def test_the_cluster_in_small(tiny: Path, tmp_path: Path) -> None:
    run = config.load(ROOT / "configs" / "cluster_cpu.yaml", [f"model_name_or_path={tiny}"])
    report = checks.check(run)
    assert report["servers"] == {"count": 1, "nodes": 1, "per_node": 1, "gpus": 0}
    assert (report["counts"]["ranks"], report["counts"]["max_steps"]) == (4, 5)
    assert (report["warnings"], report["not_checked"]) == ([], [])
