"""Packed rows against the same sequences one by one: losses, every gradient, and what may not leak."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_flash_attention_utils import (
    _is_packed_sequence,
    prepare_fa_kwargs_from_position_ids,
)

from hpcgrpo import served
from hpcgrpo.learning import attention
from hpcgrpo.learning.attention import ATTENTION, Layout, check_model, packed_attention, position_ids

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
MODELS: dict[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES, num_key_value_heads=2)),
    "qwen2-all-heads": (Qwen2ForCausalLM, Qwen2Config(**SIZES, num_key_value_heads=6)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, num_key_value_heads=3, tie_word_embeddings=True)),
}
LAYOUTS = {
    "lone": Layout((9,), ((),)),
    "packed": Layout((7, 1, 12), ((), (), ())),
    "shared": Layout((6,), ((4, 1, 9),)),
    "groups": Layout((5, 8, 3), ((2, 7), (), (6, 1, 1))),
    "empty tails": Layout((5, 4), ((0, 3, 0), (0,))),
    "unshared": Layout((4, 6), ((5,), (3,))),
}


def build(name: str, attn_implementation: str) -> Any:
    kind, config = MODELS[name]
    torch.manual_seed(1)
    model = kind._from_config(deepcopy(config), attn_implementation=attn_implementation)
    torch.manual_seed(2)
    for parameter in model.parameters():  # biases and norms start as constants, which would hide mistakes
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def random_ids(layout: Layout) -> Tensor:
    return torch.randint(61, (1, layout.plan.tokens), generator=torch.Generator().manual_seed(3))


def sequences(layout: Layout) -> list[list[int]]:
    """The row's places that make up each whole sequence, worked out by walking through the row."""
    prefixes: list[list[int]] = []
    for size in layout.prefixes:
        start = sum(len(p) for p in prefixes)
        prefixes.append(list(range(start, start + size)))
    found, tail = [], sum(layout.prefixes)
    for prefix, tails in zip(prefixes, layout.tails, strict=True):
        for length in tails:
            found.append(prefix + list(range(tail, tail + length)))
            tail += length
        found += [prefix] if not tails else []
    return found


def loss_of(logits: Tensor, places: Tensor) -> Tensor:
    """A different weight at every place, so that swapped or doubled tokens show."""
    log_p = torch.log_softmax(logits, -1)[:, :7]
    return (log_p * torch.cos(places[:, None] + torch.arange(7.0))).mean()


def packed_gradients(model: Any, layout: Layout) -> tuple[Tensor, list[Tensor]]:
    ids = random_ids(layout)
    logits = model(input_ids=ids, position_ids=position_ids(layout), use_cache=False, layout=layout).logits[0]
    # a prefix's place counts once for each sequence it is part of
    loss = sum(loss_of(logits[s], torch.tensor(s)) for s in sequences(layout))
    assert isinstance(loss, Tensor)
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def single_gradients(model: Any, layout: Layout) -> tuple[Tensor, list[Tensor]]:
    ids = random_ids(layout)
    loss = sum(
        loss_of(model(input_ids=ids[:, s], use_cache=False).logits[0], torch.tensor(s))
        for s in sequences(layout)
    )
    assert isinstance(loss, Tensor)
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


def assert_near(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()), (a - b).abs().max()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_equal_sequences_one_by_one(name: str, layout: Layout) -> None:
    loss, gradients = packed_gradients(build(name, ATTENTION), layout)
    expected_loss, expected = single_gradients(build(name, "sdpa"), layout)
    assert_near([loss, *gradients], [expected_loss, *expected], 2e-6)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_equal_under_activation_checkpointing(name: str) -> None:
    layout = LAYOUTS["groups"]
    model = build(name, ATTENTION).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.model.layers[0].self_attn.register_forward_hook(count)
    loss, gradients = packed_gradients(model, layout)
    expected_loss, expected = single_gradients(build(name, "eager").train(), layout)
    assert calls == 2, "the layer was not computed again"
    assert_near([loss, *gradients], [expected_loss, *expected], 2e-6)


def test_bfloat16_is_near() -> None:
    layout = LAYOUTS["groups"]
    _, gradients = packed_gradients(build("qwen2", ATTENTION).bfloat16(), layout)
    _, single = single_gradients(build("qwen2", "sdpa").bfloat16(), layout)
    _, exact = single_gradients(build("qwen2", "sdpa"), layout)

    def distance(xs: list[Tensor]) -> float:
        return sum((x - y).square().sum().item() for x, y in zip(xs, exact, strict=True)) ** 0.5

    assert distance(gradients) <= 1.3 * distance(single)


@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernel_against_written_out_attention(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """The merge, GQA included, against a softmax over an explicit mask and autograd through it."""
    layout = LAYOUTS["groups"]
    tokens = layout.plan.tokens
    allowed = torch.zeros(tokens, tokens, dtype=torch.bool)
    for s in sequences(layout):
        for i, place in enumerate(s):
            allowed[place, s[: i + 1]] = True
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, tokens, 8, dtype=dtype, requires_grad=True) for h in (heads[0], *[heads[1]] * 2)
    )
    whole_k, whole_v = (x.repeat_interleave(heads[0] // heads[1], 1) for x in (k, v))
    scores = (q @ whole_k.mT * 0.3).masked_fill(~allowed, -torch.inf)
    expected = (scores.softmax(-1) @ whole_v).transpose(1, 2)
    ours, _ = packed_attention(torch.nn.Identity(), q, k, v, None, scaling=0.3, layout=layout)
    grad = torch.randn_like(expected)
    mine = torch.autograd.grad(ours, (q, k, v), grad)
    theirs = torch.autograd.grad(expected, (q, k, v), grad)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert_near([ours, *mine], [expected, *theirs], tolerance)


def test_tokens_of_other_sequences_have_no_influence() -> None:
    """Change one token: exactly the places that come after it in its own sequences change, bit for bit."""
    layout = LAYOUTS["groups"]
    model = build("qwen2", ATTENTION).eval()
    ids = random_ids(layout)

    def hidden(ids: Tensor) -> Tensor:
        out = model.model(input_ids=ids, position_ids=position_ids(layout), use_cache=False, layout=layout)
        return out.last_hidden_state[0].detach()

    before = hidden(ids)
    for place in range(layout.plan.tokens):
        other = ids.clone()
        other[0, place] = (ids[0, place] + 1) % 61
        changed = (hidden(other) != before).any(-1).nonzero()[:, 0].tolist()
        after = {p for s in sequences(layout) if place in s for p in s[s.index(place) :]}
        assert changed == sorted(after), place


def test_positions_go_on_where_the_prefix_ends() -> None:
    layout = Layout((3, 2), ((2, 1), (2,)))
    assert position_ids(layout).tolist() == [[0, 1, 2, 0, 1, 3, 4, 3, 2, 3]]
    assert layout.plan.own == ((0, 3, 1), (3, 2, 2), (7, 1, 1), (8, 2, 1))  # start, length, how many
    assert layout.plan.cross == (((5, 8), (0, 3)), ((8, 10), (3, 5)))


def test_a_row_without_its_layout_or_of_another_size_is_refused() -> None:
    model = build("llama", ATTENTION)
    ids = torch.ones(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="layout"):
        model(input_ids=ids, use_cache=False)
    with pytest.raises(ValueError, match="6 tokens"):
        model(input_ids=ids, use_cache=False, layout=Layout((6,), ((),)))
    with pytest.raises(ValueError, match="a mask"):
        mask = torch.zeros(1, 1, 5, 5)
        model(input_ids=ids, attention_mask=mask, use_cache=False, layout=Layout((5,), ((),)))
    q = torch.ones(1, 2, 5, 8)
    with pytest.raises(ValueError, match="softcap"):
        packed_attention(torch.nn.Identity(), q, q, q, None, layout=Layout((5,), ((),)), softcap=30.0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MistralConfig(), "sliding"),
        (Qwen2Config(use_sliding_window=True, max_window_layers=0), "sliding"),
        (Gemma2Config(), "softcaps"),
        (GptOssConfig(), "sinks"),
        (MambaConfig(), "state-space"),
        (LlamaConfig(attention_dropout=0.1), "dropout"),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "rotary"),
        (
            Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [1.0] * 48,
                    "original_max_position_embeddings": 64,
                }
            ),
            "rotary",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else x.model_type,
)
def test_models_that_packing_would_change_are_refused(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"{config.model_type}: packed rows cannot serve .*{words}"):
        check_model(config)
    known = json.loads(config.to_json_string(use_diff=False))
    assert words in ", ".join(served.unserved(served.of_json(known)))  # its file alone tells it


def test_models_that_packing_serves_pass() -> None:
    scaled = LlamaConfig(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    )
    for config in [*(config for _, config in MODELS.values()), MistralConfig(sliding_window=None), scaled]:
        check_model(config)
        assert served.unserved(served.of_json(json.loads(config.to_json_string(use_diff=False)))) == []


def test_files_as_they_lie_on_the_hub_are_read_alike() -> None:
    """A window that is switched off, an old name of the rotary type, the text part of a model that sees."""
    qwen2 = {"model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False}
    assert served.unserved(served.of_json(qwen2)) == []
    assert served.unserved(served.of_json(qwen2 | {"use_sliding_window": True})) == [
        "layers of the type sliding_attention"
    ]
    assert served.unserved(
        served.of_json({"model_type": "mistral", "text_config": {"sliding_window": 4096}})
    ) == ["layers of the type sliding_attention"]
    for name in ("type", "rope_type"):
        rope = {"model_type": "llama", "rope_scaling": {name: "dynamic", "factor": 2.0}}
        assert served.unserved(served.of_json(rope)) == ["dynamic rotary positions"]


def test_cuda_kernels_have_the_right_shapes() -> None:
    """On the meta device: the calls fit torch's signatures and return what the merge needs."""
    q, k = (
        torch.empty(1, 6, 5, 16, device="meta").bfloat16(),
        torch.empty(1, 2, 9, 16, device="meta").bfloat16(),
    )
    out, lse = attention._cuda_forward(q, k, k, False, 0.25)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (1, 6, 5), torch.float32)
    grads = attention._cuda_backward(out, q, k, k, out, lse, False, 0.25)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_cuda_equals_cpu() -> None:
    layout = LAYOUTS["groups"]
    torch.manual_seed(0)
    shapes = [(1, h, layout.plan.tokens, 16) for h in (6, 2, 2)]
    tensors = [torch.randn(s).bfloat16() for s in shapes]
    results = []
    for device in ("cpu", "cuda"):
        q, k, v = (x.to(device).requires_grad_() for x in tensors)
        out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, scaling=0.25, layout=layout)
        results.append([x.cpu().float() for x in (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))])
    assert_near(results[1], results[0], 3e-2)


@pytest.mark.parametrize("requested", ["packed", "sdpa", "eager"])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_what_is_asked_for_is_chosen_where_it_can_run(requested: str, device_type: str) -> None:
    assert attention.attention_choice(requested, device_type) == (requested, None)


def test_without_a_gpu_or_the_package_flash_attention_gives_way_to_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen, note = attention.attention_choice("flash_attention_2", "cpu")
    assert chosen == ATTENTION and note is not None and "needs a GPU" in note
    monkeypatch.setattr(
        attention, "is_flash_attn_2_available", lambda: False
    )  # the same on a machine with a GPU
    chosen, note = attention.attention_choice("flash_attention_2", "cuda")
    assert chosen == ATTENTION and note is not None and "pip install 'hpcgrpo[flash-attn]'" in note
    monkeypatch.setattr(attention, "is_flash_attn_2_available", lambda: True)
    assert attention.attention_choice("flash_attention_2", "cuda") == ("flash_attention_2", None)


def segment_by_segment(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **extra: Any
) -> tuple[Tensor, None]:
    """What flash_attn_varlen_func computes from the lengths that transformers reads off the positions."""
    assert attention_mask is None
    (ends, _), _ = prepare_fa_kwargs_from_position_ids(extra["position_ids"])
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    parts = [
        scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (query, key, value)), is_causal=True, scale=scaling
        )
        for a, b in pairwise(ends.tolist())
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


@pytest.mark.parametrize("name", MODELS)
def test_positions_alone_tell_transformers_flash_path_where_whole_sequences_end(name: str) -> None:
    """Without a GPU: the path's own reading of a row, and its attention written out."""
    AttentionInterface.register("segment_by_segment", segment_by_segment)
    layout = LAYOUTS["packed"]
    assert _is_packed_sequence(position_ids(layout), 1)
    model = build(name, "segment_by_segment")
    whole = model(input_ids=random_ids(layout), position_ids=position_ids(layout), use_cache=False).logits[0]
    loss = sum(loss_of(whole[s], torch.tensor(s)) for s in sequences(layout))
    assert isinstance(loss, Tensor)
    expected_loss, expected = single_gradients(build(name, "sdpa"), layout)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert_near([loss, *gradients], [expected_loss, *expected], 2e-6)


def test_the_flash_path_takes_one_sequence_as_it_is_and_would_misread_a_shared_prefix() -> None:
    """So rows for it hold whole sequences: `shared_prefix` is for packed attention alone."""
    one = Layout((4,), ((3,),))
    assert not _is_packed_sequence(position_ids(one), 1)
    (ends, _), _ = prepare_fa_kwargs_from_position_ids(position_ids(Layout((4,), ((2, 3),))))
    assert ends.tolist() == [0, 9]  # one sequence, where three segments share out the nine tokens
