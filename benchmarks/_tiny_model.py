"""The model, tokenizer and prompts that the sides of `vs_trl.py` and `learner_step.py` are given."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 512
PAD, EOS, BOS, UNK = range(4)
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the chat template adds nothing, so text and chat prompts are the same tokens."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *map(chr, range(32, 127)), "\n"]
    names += [f"<x{i}>" for i in range(len(names), VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        bos_token="<bos>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=PLAIN_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    *, hidden: int = 256, layers: int = 4, vocabulary: int = VOCABULARY, seed: int = 0
) -> Qwen2ForCausalLM:
    """A random Qwen2 whose last hidden state has a constant first coordinate, for `set_stop_probability`."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 32,
            num_key_value_heads=2,
            intermediate_size=3 * hidden,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=PAD,
            eos_token_id=EOS,
            bos_token_id=BOS,
        )
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1.0
        for layer in model.model.layers:  # nothing else writes to coordinate 0
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[EOS] = 0.0
    return model


@torch.no_grad()
def never_sample(model: Qwen2ForCausalLM, tokens: Sequence[int]) -> None:
    """Set these tokens' rows so that none of them is sampled at any position."""
    hidden = model.model(input_ids=torch.arange(4, 64)[None]).last_hidden_state
    model.lm_head.weight[list(tokens), 0] = -1000.0 / hidden[..., 0].mean()


@torch.no_grad()
def set_stop_probability(model: Qwen2ForCausalLM, probability: float) -> None:
    """Set the end token's row so that it is sampled with this mean probability at any position (0: never)."""
    tokens = torch.randint(4, VOCABULARY, (8, 64), generator=torch.Generator().manual_seed(1))
    hidden = model.model(input_ids=tokens).last_hidden_state
    head = model.lm_head.weight
    others = (hidden @ head.T).index_fill(-1, torch.tensor([EOS]), -torch.inf).logsumexp(-1)
    if probability == 0:
        never_sample(model, [EOS])
        return
    low, high = -100.0, 100.0
    for _ in range(60):  # the mean probability grows with the weight
        middle = (low + high) / 2
        mean = torch.sigmoid(middle * hidden[..., 0] - others).mean()
        low, high = (middle, high) if mean < probability else (low, middle)
    head[EOS, 0] = middle


def mean_length(stop_probability: float, max_length: int) -> float:
    """Mean completion length (the end token counted) under a constant stop probability, cut at max_length."""
    if stop_probability == 0:
        return float(max_length)
    return -math.expm1(max_length * math.log1p(-stop_probability)) / stop_probability


def stop_probability_for(mean: float, max_length: int) -> float:
    """The stop probability under which completions have this mean length."""
    low, high = 1e-9, 1 - 1e-9
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_length(middle, max_length) > mean else (low, middle)
    return middle


def questions(*, prompt_tokens: int, count: int = 512, seed: int = 0) -> list[dict[str, str]]:
    """Sums of two-digit numbers, 6 characters each; worked ones before it fill a longer prompt."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        x, y = rng.randint(10, 99), rng.randint(10, 99)
        question = f"{x}+{y}="
        worked = ""
        while len(worked) < prompt_tokens:
            a, b = rng.randint(10, 99), rng.randint(10, 99)
            worked = f"{a}+{b}={a + b}\n" + worked
        spare = max(0, prompt_tokens - len(question))
        rows.append({"prompt": worked[len(worked) - spare :] + question, "answer": str(x + y)})
    return rows


def save_inputs(folder: Path, *, prompt_tokens: int, stop_probability: float) -> None:
    """Write model/, prompts.jsonl and questions.jsonl (chat form of the same prompts) into a folder."""
    model = build_model()
    set_stop_probability(model, stop_probability)
    model.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    rows = questions(prompt_tokens=prompt_tokens)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
