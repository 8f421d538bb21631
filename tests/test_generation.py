"""In-process sampling: the tokens of transformers, the right distribution, and seeds that alone decide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hpcgrpo.generation import transformers as module
from hpcgrpo.generation.transformers import TransformersGenerator, draw
from hpcgrpo.types import Completion, Request, Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
}
EOS = (3, 5, 11)


def build(name: str = "qwen2", seed: int = 0) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(seed)
    return kind._from_config(deepcopy(config), attn_implementation="sdpa").eval()


def generator(
    name: str = "qwen2", seed: int = 0, eos: Sequence[int] = EOS, **options: Any
) -> TransformersGenerator:
    return TransformersGenerator(
        build(name, seed), decode=lambda ids: "".join(map(chr, ids)), eos_token_ids=eos, **options
    )


def prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    source = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(12, 40, (n,), generator=source).tolist()) for n in lengths]


def requests(lengths: Sequence[int], copies: int = 1) -> list[Request]:
    repeated = [p for p in prompts(lengths) for _ in range(copies)]
    return [Request(p, seed=100 + i) for i, p in enumerate(repeated)]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers_generate(name: str) -> None:
    """Mixed prompt lengths in one batch against transformers one prompt at a time."""
    asked = requests((4, 9, 1, 4, 6))
    greedy = Sampling(temperature=0.0, max_completion_length=20)
    endless = tokens(generator(name, eos=()).generate(asked, greedy))
    ends = [endless[0][2], endless[1][7]]  # so that rows end early, at different places
    options = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=ends, pad_token_id=0)
    model = build(name)
    ours = generator(name, eos=ends).generate(asked, greedy)
    for request, completion in zip(asked, ours, strict=True):
        ids = torch.tensor([request.prompt_token_ids])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)
        assert completion.token_ids == tuple(whole[0, ids.shape[1] :].tolist())
    assert len({len(c.token_ids) for c in ours}) > 1


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_a_full_forward(name: str, temperature: float) -> None:
    """Log-probs at the sampling temperature (1 when greedy), for ragged prompts and completions."""
    asked = requests((4, 9, 2, 4), copies=3)
    model = build(name)
    for request, c in zip(
        asked,
        generator(name).generate(asked, Sampling(temperature=temperature, max_completion_length=24)),
        strict=True,
    ):
        whole = torch.tensor([request.prompt_token_ids + c.token_ids])
        logits = model(whole).logits[0, len(request.prompt_token_ids) - 1 : -1]
        expected = torch.log_softmax(logits / (temperature or 1.0), -1).gather(
            1, torch.tensor(c.token_ids)[:, None]
        )
        assert c.logprobs == pytest.approx(expected[:, 0].tolist(), abs=1e-5)


def test_a_request_gives_the_same_tokens_in_any_batch_and_order() -> None:
    asked = requests((4, 9, 2, 4, 7), copies=4)
    sampling = Sampling(temperature=1.0, max_completion_length=30)
    together = tokens(generator().generate(asked, sampling))
    alone = [tokens(generator().generate([r], sampling))[0] for r in asked[::3]]
    backwards = tokens(generator().generate(asked[::-1], sampling))[::-1]
    halves = [tokens(generator().generate(asked[i::2], sampling)) for i in range(2)]
    cut = tokens(generator(max_batch_tokens=100).generate(asked, sampling))
    assert alone == together[::3]
    assert backwards == together
    assert [t for pair in itertools.zip_longest(*halves) for t in pair if t] == together
    assert cut == together


def test_a_longer_limit_only_goes_on() -> None:
    asked = requests((4, 9), copies=4)
    short, long = (
        tokens(generator(eos=()).generate(asked, Sampling(temperature=1.0, max_completion_length=n)))
        for n in (7, 23)
    )
    assert [len(t) for t in long] == [23] * 8
    assert [t[:7] for t in long] == short


def test_seeds_decide() -> None:
    prompt = prompts((5,))[0]
    sampling = Sampling(temperature=1.0, max_completion_length=12)
    asked = [Request(prompt, seed) for seed in (1, 2, 3, 1)]
    first, second, third, again = tokens(generator(eos=()).generate(asked, sampling))
    assert first == again
    assert len({first, second, third}) == 3


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_first_tokens_follow_the_distribution(temperature: float) -> None:
    """Chi-square of 4,000 first tokens against the softmax; the bound is passed once in 10^6 runs."""
    prompt = prompts((5,))[0]
    count = 4000
    done = generator(eos=()).generate(
        [Request(prompt, seed) for seed in range(count)],
        Sampling(temperature=temperature, max_completion_length=1),
    )
    p = torch.softmax(build()(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)
    seen = torch.bincount(torch.tensor([c.token_ids[0] for c in done]), minlength=40)
    often = p * count >= 5
    expected = torch.cat([p[often], p[~often].sum()[None]]) * count
    found = torch.cat([seen[often], seen[~often].sum()[None]])
    chi_square, freedom = ((found - expected) ** 2 / expected).sum().item(), len(expected) - 1
    assert freedom >= 5
    # Wilson and Hilferty's normal approximation to the chi-square distribution
    z = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.75


@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 3), (0.6, 5), (1e-6, 0)])
def test_a_cut_distribution_is_that_of_transformers(top_p: float, top_k: int) -> None:
    torch.manual_seed(0)
    logits, temperature = torch.randn(1, 12) * 2, 0.7
    warped = TopKLogitsWarper(top_k)(None, logits / temperature) if top_k else logits / temperature
    expected = TopPLogitsWarper(top_p)(None, warped).softmax(-1)[0]
    uniforms = (torch.arange(20_000) + 0.5).double() / 20_000
    drawn, logprobs = draw(logits.repeat(20_000, 1), uniforms, temperature, top_p, top_k)
    shares = torch.bincount(drawn, minlength=12) / 20_000
    assert shares == pytest.approx(expected.tolist(), abs=1e-4)
    assert logprobs.exp().tolist() == pytest.approx(expected[drawn].tolist(), abs=1e-6)


def test_completions_are_streamed_batch_by_batch() -> None:
    asked, sampling = (
        requests((4, 9), copies=3),
        Sampling(temperature=1.0, max_completion_length=8, top_p=0.9),
    )
    cut, arrived = generator(max_batch_tokens=40), {}
    cut.stream(asked, sampling, arrived.__setitem__)
    assert len(list(cut._batches(asked, 8))) > 1
    assert tokens([arrived[i] for i in range(6)]) == tokens(generator().generate(asked, sampling))


def test_draw_at_the_edges() -> None:
    """Probabilities 0, 1/4, 0, 3/4, 0: what has none is not drawn at 0, beside 1/4 or just below 1."""
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, math.log(3), -torch.inf])
    u = torch.tensor([0.0, 0.2499, 0.2501, 1 - 2**-53], dtype=torch.float64)
    chosen, logprobs = draw(logits.expand(4, 5).clone(), u, 1.0)
    assert chosen.tolist() == [1, 1, 3, 3]
    assert logprobs.tolist() == pytest.approx([math.log(1 / 4)] * 2 + [math.log(3 / 4)] * 2)
    # at temperature 1/2 they are 1/10 and 9/10; greedy takes the likeliest and reports temperature 1
    assert draw(logits.expand(2, 5).clone(), u[1:3] * 0.4, 0.5)[0].tolist() == [1, 3]
    assert draw(logits[None].clone(), u[:1], 0.0)[1].item() == pytest.approx(math.log(3 / 4))
    cold = draw(torch.tensor([[1e4, 1.5e4, -1e4]]), u[:1], 1e-6)
    assert (cold[0].item(), cold[1].item()) == (1, 0.0)


def test_a_completion_ends_with_the_first_of_several_end_tokens() -> None:
    """The run without end tokens, cut by hand after the first of them."""
    asked = requests((4, 6, 9), copies=8)
    sampling = Sampling(temperature=1.3, max_completion_length=25)
    endless = generator(eos=()).generate(asked, sampling)
    ended = generator().generate(asked, sampling)
    assert {c.finish_reason for c in endless} == {"length"}
    for free, c in zip(endless, ended, strict=True):
        first = next((i for i, t in enumerate(free.token_ids) if t in EOS), None)
        kept = free.token_ids if first is None else free.token_ids[: first + 1]
        assert c.token_ids == kept
        assert c.finish_reason == ("length" if first is None else "stop")
        assert c.text == "".join(map(chr, kept)) and len(c.logprobs) == len(kept)
    assert {c.token_ids[-1] for c in ended if c.finish_reason == "stop"} == set(EOS)


def test_an_end_token_at_the_last_place_is_a_stop() -> None:
    asked = requests((4,), copies=200)
    done = generator().generate(asked, Sampling(temperature=1.0, max_completion_length=1))
    assert {(c.token_ids[0] in EOS, c.finish_reason) for c in done} == {(True, "stop"), (False, "length")}


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_when_rows_are_taken_out_changes_nothing(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every ended row, at half of them, never."""
    asked = requests((4, 9, 2), copies=8)
    sampling = Sampling(temperature=1.0, max_completion_length=30)
    usual = generator().generate(asked, sampling)
    monkeypatch.setattr(module, "COMPACT_AT", share)
    other = generator().generate(asked, sampling)
    assert tokens(other) == tokens(usual)
    for a, b in zip(usual, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_rows_that_end_save_work_and_prompts_are_read_once() -> None:
    ours = generator()
    rows: list[tuple[int, ...]] = []
    ours.model.model.embed_tokens.register_forward_hook(lambda _, args, __: rows.append(tuple(args[0].shape)))
    done = ours.generate(requests((4, 6), copies=16), Sampling(temperature=1.0, max_completion_length=40))
    assert rows[:2] == [(1, 4), (1, 6)]
    decoded = [n for n, _ in rows[2:]]
    assert decoded == sorted(decoded, reverse=True)
    needed = sum(len(c.token_ids) - 1 for c in done)
    assert needed <= sum(decoded) <= needed / (1 - module.COMPACT_AT) + len(decoded)


def test_batches_keep_to_the_token_limit() -> None:
    ours = generator(max_batch_tokens=3 * (9 + 10))
    asked = requests((9, 2, 9, 5), copies=3)
    batches = list(ours._batches(asked, 10))
    assert sorted(itertools.chain(*batches)) == list(range(12))
    for batch in batches:
        longest = max(len(asked[i].prompt_token_ids) for i in batch)
        assert len(batch) * (longest + 10) <= 57
    assert [len(b) for b in generator(max_batch_tokens=1)._batches(asked, 10)] == [1] * 12
    assert [len(b) for b in generator(max_batch_tokens=None)._batches(asked, 10)] == [12]


@pytest.mark.parametrize("name", MODELS)
def test_new_weights_are_those_of_the_model_they_came_from(name: str) -> None:
    asked = requests((4, 9), copies=3)
    sampling = Sampling(temperature=1.0, max_completion_length=15)
    ours, other = generator(name), build(name, seed=1)
    before = ours.generate(asked, sampling)
    ours.update_weights(lambda: ((n, p.detach()) for n, p in other.named_parameters()), version=7)
    after = ours.generate(asked, sampling)
    assert tokens(after) != tokens(before)
    assert after == [
        Completion(c.token_ids, c.logprobs, c.finish_reason, c.text, c.seed, weights_version=7)
        for c in generator(name, seed=1).generate(asked, sampling)
    ]
    assert {c.weights_version for c in before} == {0}


def test_tied_weights_may_come_under_both_names_but_must_agree() -> None:
    ours, other = generator(), build(seed=1)
    ours.update_weights(other.state_dict().items, version=1)
    assert "lm_head.weight" in other.state_dict()
    assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight
    untied = {**other.state_dict(), "lm_head.weight": other.lm_head.weight + 1}
    with pytest.raises(ValueError, match="ties"):
        ours.update_weights(untied.items, version=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("model.norm.weight"), "1 parameters did not come, first model.norm.weight"),
        (lambda s: s.update({"model.nrom.weight": torch.ones(32)}), "model.nrom.weight is no parameter"),
        (lambda s: s.update({"model.norm.weight": torch.ones(31)}), r"model.norm.weight .*\(31,\).*\(32,\)"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_broken_update_is_named_and_stops_sampling_until_a_whole_one(change: Any, words: str) -> None:
    ours = generator()
    whole = dict(build(seed=1).state_dict())
    broken = dict(whole)
    change(broken)
    sampling = Sampling(temperature=1.0, max_completion_length=3)
    with pytest.raises(ValueError, match=words):
        ours.update_weights(broken.items, version=1)
    with pytest.raises(ValueError, match="broke off"):
        ours.generate(requests((4,)), sampling)
    ours.update_weights(whole.items, version=1)
    assert ours.generate(requests((4,)), sampling)[0].weights_version == 1


def test_weights_are_cast_to_the_model_type() -> None:
    ours = TransformersGenerator(build().bfloat16(), decode=str, eos_token_ids=EOS)
    ours.update_weights(build(seed=1).state_dict().items, version=1)
    asked, sampling = requests((4, 6), copies=2), Sampling(temperature=1.0, max_completion_length=8)
    expected = TransformersGenerator(build(seed=1).bfloat16(), decode=str, eos_token_ids=EOS)
    assert tokens(ours.generate(asked, sampling)) == tokens(expected.generate(asked, sampling))


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ((), Sampling(1.0, 4), "no tokens"),
        ((1,) * 60, Sampling(1.0, 5), "60 tokens and max_completion_length 5 exceed the model's 64"),
        ((1,), Sampling(-0.1, 4), "temperature: -0.1"),
        ((1,), Sampling(math.nan, 4), "temperature: nan"),
        ((1,), Sampling(1.0, 0), "max_completion_length: 0"),
    ],
)
def test_bad_requests_are_named(prompt: tuple[int, ...], sampling: Sampling, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generator().generate([Request(prompt, 0)], sampling)


def test_weights_that_are_not_finite_are_named() -> None:
    ours = generator()
    ours.model.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        ours.generate(requests((4,)), Sampling(temperature=1.0, max_completion_length=3))


def test_models_it_has_no_cache_for_are_refused() -> None:
    sliding = Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=0))
    with pytest.raises(ValueError, match="sliding_attention"):
        TransformersGenerator(sliding, decode=str, eos_token_ids=EOS)
    windowed = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))
    with pytest.raises(ValueError, match="sliding"):
        TransformersGenerator(windowed, decode=str, eos_token_ids=EOS)


def test_leaves_the_model_as_it_was() -> None:
    ours = generator()
    ours.model.train()
    assert ours.generate([], Sampling(1.0, 4)) == []
    ours.generate(requests((4,)), Sampling(temperature=1.0, max_completion_length=3))
    assert ours.model.training and torch.is_grad_enabled()
    assert ours.model(torch.ones(1, 3, dtype=torch.int64)).logits.requires_grad
