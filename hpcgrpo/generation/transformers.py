"""In-process sampling with a transformers model on a copy of the weights of its own.

Prompts are read in once each, in batches of one length, so nothing is padded; their keys and values are then
copied to every completion of the prompt. All completions decode together in one preallocated cache; where
prompt lengths differ, each row ends at the same slot and the slots before its start are masked. Rows that end
are swapped behind the live ones, so that the work follows the lengths that are really sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from hpcgrpo.generation.cache import ATTENTION, Slab
from hpcgrpo.generation.decode import PLAIN_DECODERS, PlainDecoder
from hpcgrpo.generation.decoded import Decoded
from hpcgrpo.served import other_layers
from hpcgrpo.types import Arrived, Completion, Request, Sampling

COMPACT_AT = 1 / 8  # share of ended rows at which they are taken out; moving them costs less than one step


class TransformersGenerator:
    """Samples completions of token ids from a causal language model held in this process."""

    def __init__(
        self,
        model: Any,
        *,
        decode: Callable[[Sequence[int]], str],
        eos_token_ids: Collection[int],
        max_batch_tokens: int | None = 2**16,
    ) -> None:
        """model: a transformers causal LM that no one else changes; its attention is set to this module's.

        `decode` turns token ids into text without special tokens. A completion ends with the first of
        `eos_token_ids`. `max_batch_tokens` bounds rows * (longest prompt + max_completion_length) of what is
        decoded together, by which the cache is allocated; None decodes everything at once.

        Raises ValueError for models with layers other than full attention.
        """
        if kinds := other_layers(model.config):
            raise ValueError(
                f"model type {model.config.model_type}: the in-process generator has no cache for layers of "
                f"the type {', '.join(kinds)}. Use backend vllm or a model with full attention."
            )
        model.set_attn_implementation(ATTENTION)
        self.model, self.decode, self.max_batch_tokens = model, decode, max_batch_tokens
        plain = model.config.model_type in PLAIN_DECODERS
        self._decoder = PlainDecoder(model) if plain else None
        self.weights_version = 0
        self._decoded = Decoded()
        self._whole = True  # False once an update broke off half-way
        self._is_eos = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=model.device)
        self._is_eos[list(eos_token_ids)] = True

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived | None = None
    ) -> list[Completion]:
        """One completion per request, in their order; otherwise as `stream`."""
        answers: dict[int, Completion] = {}

        def came(i: int, completion: Completion) -> None:
            answers[i] = completion
            if arrived is not None:
                arrived(i, completion)

        self.stream(requests, sampling, came)
        return [answers[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request], sampling: Sampling, arrived: Arrived) -> None:
        """Give each request's number and completion to `arrived`, batch by batch.

        Token t of a request is the inverse of the cumulative softmax(logits / temperature) at the t-th number
        that its seed draws: it depends on nothing but the weights, the prompt, the seed and t, whatever else
        is in the batch (short of ties within float rounding). `logprobs` are those of that distribution, from
        float32 logits. Temperature 0 takes the likeliest token and reports log-probs at temperature 1.

        Raises ValueError for an empty prompt, for one that leaves no room for `max_completion_length` within
        the model's positions, for sampling options out of range, and after an update that broke off.
        """
        self._check(requests, sampling)
        with _evaluating(self.model), torch.inference_mode():
            for batch in self._batches(requests, sampling.max_completion_length):
                done = self._complete([requests[i] for i in batch], sampling)
                lengths = (
                    (len(requests[i].prompt_token_ids), len(c.token_ids))
                    for i, c in zip(batch, done, strict=True)
                )
                self._decoded = self._decoded.then(Decoded.side_by_side(lengths))
                for i, completion in zip(batch, done, strict=True):
                    arrived(i, completion)

    def take_decoded(self) -> dict[str, Decoded]:
        """What was decoded since this was last asked, under no name: every rank has a model of its own."""
        done, self._decoded = self._decoded, Decoded()
        return {"": done}

    def metrics(self) -> dict[str, float]:
        """Nothing: what would be told of engines holds here by construction, each prompt is read once a batch."""
        return {}

    @torch.no_grad()
    def update_weights(self, tensors: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> None:
        """Copy new weights in place, by parameter name, casting to the model's type.

        Every parameter must come; tied ones may come under one name or under all. Raises ValueError for an
        unknown or missing name and a wrong shape; the generator then refuses to sample until a whole update.
        """
        named = dict(self.model.named_parameters(remove_duplicate=False))
        self._whole = False
        seen: set[int] = set()
        for name, tensor in tensors():
            _copy_into(named, name, tensor, seen)
        missing = [name for name, parameter in named.items() if id(parameter) not in seen]
        if missing:
            raise ValueError(f"weight update: {len(missing)} parameters did not come, first {missing[0]}.")
        self.weights_version, self._whole = version, True

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if not self._whole:
            raise ValueError("the last weight update broke off: push all weights before sampling.")
        if not 0 <= sampling.temperature < float("inf"):
            raise ValueError(f"temperature: {sampling.temperature} is not a number from 0 up (0 is greedy).")
        if not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
            raise ValueError(
                f"top_p: {sampling.top_p} is not in (0, 1], or top_k: {sampling.top_k} not at least 0."
            )
        if sampling.max_completion_length < 1:
            raise ValueError(f"max_completion_length: {sampling.max_completion_length} is not at least 1.")
        limit = getattr(self.model.config, "max_position_embeddings", None)
        for request in requests:
            if request.length is not None and not 0 < request.length <= sampling.max_completion_length:
                raise ValueError(
                    f"a completion of {request.length} tokens was asked for, but max_completion_length is"
                    f" {sampling.max_completion_length}: ask for 1 to that many."
                )
            length = len(request.prompt_token_ids)
            if not length:
                raise ValueError("a prompt has no tokens: the first token needs something to follow.")
            if limit and length + sampling.max_completion_length > limit:
                raise ValueError(
                    f"a prompt of {length} tokens and max_completion_length {sampling.max_completion_length} "
                    f"exceed the model's {limit} positions: lower max_prompt_length or max_completion_length."
                )

    def _batches(self, requests: Sequence[Request], max_completion_length: int) -> Iterator[list[int]]:
        """Indices of requests that decode together: like lengths together, within the token limit."""
        prompts = [r.prompt_token_ids for r in requests]
        batch: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), prompts[i])):
            slots = (len(batch) + 1) * (len(prompts[i]) + max_completion_length)
            if batch and self.max_batch_tokens is not None and slots > self.max_batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _complete(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        rows, cache, logits = self._prefill(requests, sampling.max_completion_length)
        if any(r.length for r in requests):
            rows.lengths = torch.tensor([r.length or 0 for r in requests], device=self.model.device)
        rows.uniforms.copy_(_uniforms(requests, sampling.max_completion_length))
        live = len(requests)
        for t in range(sampling.max_completion_length):
            tokens, logprobs = draw(
                logits, rows.uniforms[:live, t], sampling.temperature, sampling.top_p, sampling.top_k
            )
            rows.tokens[:live, t], rows.logprobs[:live, t] = tokens, logprobs
            ends = self._is_eos[tokens]
            if rows.lengths is not None:
                ends = (rows.lengths[:live] == t + 1) | (ends & (rows.lengths[:live] == 0))
            rows.ended[:live] |= ends
            left = live - int(rows.ended[:live].sum())
            if not left or t + 1 == sampling.max_completion_length:
                break
            if live - left >= live * COMPACT_AT:
                live = _compact(rows, cache, live)
                tokens = rows.tokens[:live, t]
            logits = self._step(tokens, rows, cache, live)
        return self._completions(requests, rows, t + 1)

    def _prefill(self, requests: Sequence[Request], room: int) -> tuple[_Rows, Cache, Tensor]:
        """Read each distinct prompt once -> empty rows, the filled cache, and first logits [rows, V]."""
        prompts = [r.prompt_token_ids for r in requests]
        longest = max(map(len, prompts))
        device = self.model.device
        slabs: list[Slab] = []
        logits = torch.empty(0)
        for length in sorted({len(p) for p in prompts}):
            batch = [i for i, p in enumerate(prompts) if len(p) == length]
            place = {p: n for n, p in enumerate(dict.fromkeys(prompts[i] for i in batch))}
            read = DynamicCache(config=self.model.config)
            last = self._last_logits(torch.tensor(list(place), device=device), read)
            if not slabs:
                logits = last.new_empty(len(prompts), last.shape[-1])
                slabs = [Slab(layer, len(prompts), longest, room) for layer in read.layers]
            into = torch.tensor(batch, device=device)
            source = torch.tensor([place[prompts[i]] for i in batch], device=device)
            logits[into] = last[source]
            for slab, layer in zip(slabs, read.layers, strict=True):
                slab.place(layer, into, source, longest - length)
        return _Rows.empty(prompts, room, device), Cache(layers=slabs), logits

    def _step(self, tokens: Tensor, rows: _Rows, cache: Cache, live: int) -> Tensor:
        """Logits [live, V] after one more token per live row."""
        mask = rows.visible
        if mask is not None:
            mask = mask[:live, :, :, : cache.get_seq_length() + 1]
        ids, positions = tokens[:, None], rows.positions[:live]
        if self._decoder is not None:
            logits = self._decoder.step(ids, positions, mask, cache.layers)
        else:
            logits = self._last_logits(ids, cache, attention_mask=mask, position_ids=positions)
        rows.positions += 1
        return logits

    def _last_logits(self, ids: Tensor, cache: Cache, **options: Tensor | None) -> Tensor:
        out = self.model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **options)
        return out.logits[:, -1]

    def _completions(self, requests: Sequence[Request], rows: _Rows, steps: int) -> list[Completion]:
        """Cut each row after its first end-of-sequence token and put the rows back in the requests' order."""
        order = rows.request.argsort()
        tokens, logprobs = rows.tokens[order, :steps], rows.logprobs[order, :steps]
        ends = self._is_eos[tokens]
        if rows.lengths is not None:
            ends &= rows.lengths[order][:, None] == 0
        stopped, first = ends.any(1), ends.int().argmax(1) + 1
        lengths = first.where(stopped, first.new_tensor(steps))
        if rows.lengths is not None:
            lengths = rows.lengths[order].where(rows.lengths[order] > 0, lengths)
        inside = torch.arange(steps, device=tokens.device) < lengths[:, None]
        if not logprobs.where(inside, logprobs.new_zeros(())).isfinite().all():
            raise ValueError("the model's logits are not finite: its weights hold NaN or infinity.")
        columns = (tokens, logprobs, lengths, stopped)
        return [
            Completion(
                token_ids=tuple(ids[:length]),
                logprobs=tuple(values[:length]),
                finish_reason="stop" if stop else "length",
                text=self.decode(ids[:length]),
                seed=request.seed,
                weights_version=self.weights_version,
            )
            for request, ids, values, length, stop in zip(
                requests, *(c.tolist() for c in columns), strict=True
            )
        ]


def draw(
    logits: Tensor, uniforms: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens [B] int64 from logits [B, V] at numbers [B] in [0, 1), and their log-probs [B] float32.

    The first token whose cumulative probability exceeds the number, in float64; one without probability adds
    nothing to the sum and is never the first. Temperature 0: the likeliest token, log-probs at temperature 1.
    float32 logits are overwritten.
    """
    scaled = logits.float()
    scaled -= scaled.amax(-1, keepdim=True)
    if temperature not in (0, 1):
        scaled /= temperature
    if temperature and (top_p < 1 or top_k):
        _likeliest(scaled, top_p, top_k)
    cumulative = scaled.exp().cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    if temperature == 0:
        tokens = scaled.argmax(-1, keepdim=True)
    else:
        # for u <= 1 - 2**-53 the product is below the total; NaN sums lead past the end and are found later
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * total, right=True)
        tokens.clamp_(max=scaled.shape[1] - 1)
    return tokens[:, 0], (scaled.gather(1, tokens) - total.log())[:, 0].float()


def _likeliest(scaled: Tensor, top_p: float, top_k: int) -> None:
    """Leave the `top_k` likeliest tokens, of those the fewest that have the probability `top_p` together; in place."""
    values, order = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k:
        values[:, top_k:] = -torch.inf
    probabilities = values.softmax(-1, dtype=torch.float64)
    values[probabilities.cumsum(-1) - probabilities >= top_p] = -torch.inf
    scaled.scatter_(-1, order, values)


def _uniforms(requests: Sequence[Request], count: int) -> Tensor:
    """[requests, count] float64 in [0, 1), each row from its request's seed alone."""
    generator = torch.Generator()
    seeded = (generator.manual_seed(r.seed) for r in requests)
    return torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in seeded])


def _copy_into(named: dict[str, nn.Parameter], name: str, tensor: Tensor, seen: set[int]) -> None:
    if name not in named:
        raise ValueError(
            f"weight update: {name} is no parameter of the model, which has {next(iter(named))}, ..."
        )
    parameter = named[name]
    if parameter.shape != tensor.shape:
        raise ValueError(
            f"weight update: {name} came with the shape {tuple(tensor.shape)}, "
            f"the model's is {tuple(parameter.shape)}."
        )
    if id(parameter) not in seen:
        parameter.copy_(tensor)
    elif not torch.equal(parameter, tensor.to(parameter)):
        raise ValueError(f"weight update: {name} differs from the parameter that the model ties it to.")
    seen.add(id(parameter))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@dataclass
class _Rows:
    """What is known of each row of the decoding batch; live rows stand first."""

    request: Tensor  # [B], the request a row answers
    uniforms: Tensor  # [B, L] float64
    tokens: Tensor  # [B, L]
    logprobs: Tensor  # [B, L] float32
    ended: Tensor  # [B] bool
    positions: Tensor  # [B, 1], of the next token
    visible: Tensor | None  # [B, 1, 1, slots] bool; None where all prompts are of one length
    lengths: Tensor | None = (
        None  # [B] tokens that a row is to have, 0 until it ends; None where all end by themselves
    )

    @classmethod
    def empty(cls, prompts: Sequence[Sequence[int]], room: int, device: torch.device) -> _Rows:
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest, count = max(map(len, prompts)), len(prompts)
        slots = torch.arange(longest + room, device=device)
        visible = (slots >= longest - lengths[:, None])[:, None, None]
        return cls(
            request=torch.arange(count, device=device),
            uniforms=torch.empty(count, room, dtype=torch.float64, device=device),
            tokens=torch.zeros(count, room, dtype=torch.int64, device=device),
            logprobs=torch.zeros(count, room, device=device),
            ended=torch.zeros(count, dtype=torch.bool, device=device),
            positions=lengths[:, None].clone(),
            visible=None if bool((lengths == longest).all()) else visible,
        )

    def swap(self, here: Tensor, there: Tensor) -> None:
        both, swapped = torch.cat([here, there]), torch.cat([there, here])
        for tensor in vars(self).values():
            if tensor is not None:
                tensor[both] = tensor[swapped]


def _compact(rows: _Rows, cache: Cache, live: int) -> int:
    """Fill the places of ended rows with live ones from the back -> the number of live rows."""
    ended = rows.ended[:live]
    left = live - int(ended.sum())
    holes = ended[:left].nonzero()[:, 0]
    movers = (~ended[left:]).nonzero()[:, 0] + left
    rows.swap(holes, movers)
    for slab in cache.layers:
        slab.move(movers, holes, left)
    return left
