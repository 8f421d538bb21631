"""Whether generator and learner give the same tokens the same log-probs, and what differs where they do not.

Run before the first update after any start: a run whose generator samples from another distribution than the
learner computes goes on without an error and learns something else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from hpcgrpo.learning.packing import Packed

MAX_ROWS = 4  # packed rows (micro-batches) of a rank that the check reads

# Mean |log-prob difference| in nats, by the type that the learner computes in. In float32 vLLM and transformers
# were within 2e-5 at every token: 1e-3 is 50 times that. SmolLM2-135M in bfloat16 is 0.032 from itself in float32
# on its own samples at temperature 0.7 (0.011 in probability), and 0.089 from itself at temperature 0.8.
THRESHOLDS = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
DTYPE_LIMIT = 0.1  # what a coarser type alone explains: three times that 0.032
TEMPERATURES = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0)  # tried where the log-probs disagree


class ParityError(ValueError):
    """Generator and learner disagree; the message says in what, and the way out."""


class Scorer(Protocol):
    """A learner, as far as it is asked here; collective over the learner ranks."""

    def logprobs_at(self, rows: Sequence[Any], temperature: float) -> list[Tensor]:
        """Log-probs [N] of each packed row's completion tokens at a temperature, without gradients."""
        ...


@dataclass(frozen=True)
class Parity:
    """How far two streams of log-probs are apart, in nats."""

    mean: float  # of the absolute differences; NaN where one is not finite
    max: float
    tokens: int

    def __add__(self, other: Parity) -> Parity:
        """Over the tokens of both."""
        tokens = self.tokens + other.tokens
        total = self.mean * self.tokens + other.mean * other.tokens
        return Parity(total / max(tokens, 1), max(self.max, other.max), tokens)


NOTHING = Parity(0.0, 0.0, 0)


@dataclass(frozen=True)
class Generated:
    """What is known of the generator beside its log-probs."""

    temperature: float  # that it was asked to sample at
    dtype: str | None = None  # that it computes in, as torch names it; None: unknown
    fingerprints_agree: bool | None = None  # of sampled weights, after the last push; None: not compared
    prompts_agree: bool = True  # the prompt ids it echoed are those that were sent


def difference(behavior: Tensor, learner: Tensor) -> Parity:
    """|behavior - learner| over tokens [T]."""
    if not behavior.numel():
        return NOTHING
    apart = (behavior.double() - learner.double()).abs()
    return Parity(apart.mean().item(), apart.max().item(), apart.numel())


def threshold(dtype: str) -> float:
    """The mean difference in nats that is still agreement for a learner that computes in `dtype`."""
    return THRESHOLDS.get(dtype.removeprefix("torch."), THRESHOLDS["bfloat16"])


def check(
    learner: Scorer,
    rows: Sequence[Packed],
    *,
    generated: Generated,
    learner_dtype: str,
    limit: float | None,
    gather: Callable[[Any], list[Any]],
    max_rows: int = MAX_ROWS,
) -> Parity:
    """Compare the generator's log-probs of the rows' tokens with the learner's, over all ranks; collective.

    Reads the first `max_rows` packed rows of each rank; all ranks must bring equally many (a plan does), since
    every forward pass is a collective. `limit` in nats, None by the learner's type. `gather` gives every rank's
    value. Without any token there is nothing to compare: a Parity of 0 tokens.

    Raises ParityError, the same on every rank.
    """
    chosen = rows[:max_rows]

    def at(temperature: float) -> Parity:
        logprobs = learner.logprobs_at(chosen, temperature)
        pairs = [(r.batch.behavior, x) for r, x in zip(chosen, logprobs, strict=True) if r.batch is not None]
        mine = sum((difference(b, x) for b, x in pairs if b is not None), NOTHING)
        return sum(gather(mine), NOTHING)

    found, allowed = at(generated.temperature), limit or threshold(learner_dtype)
    if found.mean <= allowed and generated.prompts_agree:
        return found
    tried = {t: at(t) for t in sorted({*TEMPERATURES, generated.temperature})}
    raise ParityError(diagnose(tried, generated=generated, learner_dtype=learner_dtype, limit=allowed))


def diagnose(tried: Mapping[float, Parity], *, generated: Generated, learner_dtype: str, limit: float) -> str:
    """Which of template, weights, temperature or dtype differs, and the way out.

    tried: how far the generator's log-probs are from the learner's at each temperature, the sampling
    temperature among them. limit: the mean difference in nats that is agreement.
    """
    found, asked = tried[generated.temperature], generated.temperature
    head = (
        f"generator and learner disagree: their log-probs of the same {found.tokens} tokens are"
        f" {found.mean:.3g} nats apart on average ({found.max:.3g} at most), {limit:.3g} is allowed"
        " (generation.parity_threshold)."
    )
    return f"{head} {_cause(tried, asked, generated, learner_dtype.removeprefix('torch.'), limit)}"


def _cause(
    tried: Mapping[float, Parity], asked: float, generated: Generated, learner_dtype: str, limit: float
) -> str:
    if not generated.prompts_agree:
        return (
            "What differs is the template: the generator sampled from other prompt tokens than were sent. It must"
            " take token ids as they are, without a chat template, special tokens or truncation of its own."
        )
    if generated.fingerprints_agree is False:
        return (
            "What differs is the weights: the generator's are not those that were pushed. Push them again; if that"
            " does not help, use the other generation.weight_sync."
        )
    nearest = min(tried, key=lambda t: (not tried[t].mean >= 0, tried[t].mean))
    if tried[nearest].mean <= min(max(limit, tried[asked].mean / 10), tried[asked].mean / 3):
        return _temperature(nearest, asked, tried[nearest].mean)
    theirs = (generated.dtype or learner_dtype).removeprefix("torch.")
    if theirs != learner_dtype and tried[asked].mean <= DTYPE_LIMIT:
        return (
            f"What differs is the dtype: the generator computes in {theirs}, the learner in {learner_dtype}. Set"
            f" generation.vllm_dtype: {learner_dtype}, or train.bf16: {str(theirs == 'bfloat16').lower()}."
        )
    return _weights(generated)


def _temperature(nearest: float, asked: float, mean: float) -> str:
    if nearest == 1:
        return (
            f"What differs is the temperature: the generator's log-probs are those at temperature 1 ({mean:.2g}"
            f" apart), not at the {asked:g} of the run. Start it with --logprobs-mode processed_logprobs, and let"
            " nothing between override generation.temperature."
        )
    return (
        f"What differs is the temperature: the generator's log-probs are those at temperature {nearest:g}"
        f" ({mean:.2g} apart), the run's is {asked:g}. Set generation.temperature to the one that is meant."
    )


def _weights(generated: Generated) -> str:
    if generated.fingerprints_agree:
        return (
            "Temperature and dtype do not explain it and the sampled weights agree, so what differs is weights that"
            " were not sampled, or the model around them: a config.json (rope, head) unlike the learner's, or an"
            " attention kernel. Try generation.vllm_extra_args: [--enforce-eager], and another weight_sync."
        )
    return (
        "Temperature and dtype do not explain it, so what differs is the weights: the generator's are not the"
        " learner's. See that the push before the first step reached it and that both read the same"
        " model_name_or_path."
    )
