"""The parity gate: agreement passes, and a disagreement is put down to what causes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from test_learner import learner, model  # noqa: F401
from test_vllm_generator import Held, made_requests
from vllm_server import Server, engine, serving  # noqa: F401

from hpcgrpo.generation.vllm import VllmGenerator
from hpcgrpo.learning import parity
from hpcgrpo.learning.fsdp import FsdpLearner
from hpcgrpo.learning.parity import NOTHING, Generated, Parity, ParityError
from hpcgrpo.types import Completion, MicroBatch, Piece, Request, Row, Sampling

ASKED = 0.7


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def micro_batch(requests: Sequence[Request], completions: Sequence[Completion]) -> MicroBatch:
    return tuple(
        Piece(request.prompt_token_ids, (Row(i, c.token_ids, c.logprobs, 1.0, 1.0),))
        for i, (request, c) in enumerate(zip(requests, completions, strict=True))
    )


def packed(trained: FsdpLearner, *parts: MicroBatch) -> Any:
    return trained.prepare(parts, old=False, reference=False)


def checked(trained: Any, rows: Any, **known: Any) -> Parity:
    ask = {"limit": None, "gather": lambda value: [value], "learner_dtype": "float32"}
    options = {name: known.pop(name) for name in list(known) if name in (*ask, "max_rows")}
    return parity.check(trained, rows, generated=Generated(ASKED, **known), **{**ask, **options})


# ---- numbers


def test_difference_is_of_absolute_values() -> None:
    found = parity.difference(torch.tensor([-1.0, -2.0, -3.0, -4.0]), torch.tensor([-1.5, -1.0, -3.0, -4.5]))
    assert found == Parity(mean=0.5, max=1.0, tokens=4)
    assert parity.difference(torch.tensor([]), torch.tensor([])) == NOTHING
    assert math.isnan(parity.difference(torch.tensor([1.0, math.nan]), torch.zeros(2)).mean)


def test_ranks_are_weighed_by_their_tokens() -> None:
    assert Parity(0.2, 0.3, 30) + Parity(0.6, 0.9, 10) + NOTHING == Parity(pytest.approx(0.3), 0.9, 40)
    assert NOTHING + NOTHING == NOTHING


def test_thresholds_follow_the_learners_type() -> None:
    assert parity.threshold("torch.float32") == parity.threshold("float32") == 1e-3
    assert parity.threshold("bfloat16") == parity.threshold("float16") == 0.05


# ---- the check: a learner whose log-probs are -1 / temperature at every token


class Flat:
    """A learner with known log-probs, which counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, float]] = []

    def logprobs_at(self, rows: Sequence[Any], temperature: float) -> list[torch.Tensor]:
        self.asked.append((len(rows), temperature))
        return [torch.full((len(r.targets),), -1 / temperature) for r in rows]


def flat_rows(behavior: float, *lengths: int) -> list[Any]:
    """One packed row for each length; none of tokens for 0."""
    from hpcgrpo.learning.packing import pack_row

    def batch(n: int) -> MicroBatch:
        return (Piece((5,), (Row(0, (1,) * n, (behavior,) * n, 1.0, 1.0),)),) if n else ()

    return [pack_row(batch(n), torch.device("cpu")) for n in lengths]


def test_agreement_takes_one_pass_over_the_first_rows() -> None:
    flat = Flat()
    rows = flat_rows(-1 / ASKED + 5e-4, 3, 0, 2, 4)
    assert checked(flat, rows, max_rows=3) == Parity(
        pytest.approx(5e-4, rel=1e-3), pytest.approx(5e-4, rel=1e-3), 5
    )
    assert flat.asked == [(3, ASKED)]


def test_every_rank_does_the_same_passes_and_hears_the_same() -> None:
    """This rank's own tokens agree, or it has none: it fails with the other, after the same passes."""
    other = Parity(2.0, 3.0, 5)
    messages = set()
    for lengths in ((5,), (0,)):
        flat = Flat()
        with pytest.raises(ParityError) as caught:
            checked(flat, flat_rows(-1 / ASKED, *lengths), gather=lambda mine: [mine, other])
        assert [t for _, t in flat.asked] == [ASKED, *sorted({*parity.TEMPERATURES, ASKED})]
        messages.add(str(caught.value).partition(":")[0])
    assert messages == {"generator and learner disagree"}


def test_a_run_may_set_the_limit() -> None:
    rows = flat_rows(-1 / ASKED + 0.01, 4)
    assert checked(Flat(), rows, limit=0.02).mean == pytest.approx(0.01, rel=1e-3)
    with pytest.raises(ParityError, match=r"0\.005 is allowed \(generation\.parity_threshold\)"):
        checked(Flat(), rows, limit=0.005)


def test_without_tokens_nothing_is_compared() -> None:
    assert checked(Flat(), flat_rows(0.0, 0, 0)) == NOTHING


def test_logprobs_that_are_no_numbers_do_not_pass() -> None:
    with pytest.raises(ParityError, match="nan nats apart"):
        checked(Flat(), flat_rows(math.nan, 3))


# ---- what it is put down to


def told(
    tried: Mapping[float, float], limit: float = 1e-3, learner_dtype: str = "float32", **known: Any
) -> str:
    found = {t: Parity(mean, 2 * mean, 100) for t, mean in tried.items()}
    return parity.diagnose(
        found, generated=Generated(ASKED, **known), learner_dtype=learner_dtype, limit=limit
    )


FAR = {0.5: 0.3, 0.7: 0.2, 1.0: 0.25}
NEAR = {0.5: 0.2, 0.7: 0.03, 1.0: 0.25}


@pytest.mark.parametrize(
    ("tried", "known", "cause"),
    [
        ({0.5: 0.3, 0.7: 0.1, 1.0: 2e-5}, {}, "temperature: .* at temperature 1 .*processed_logprobs"),
        ({0.5: 2e-5, 0.7: 0.1, 1.0: 0.3}, {}, "temperature: .* at temperature 0.5 .* the run's is 0.7"),
        ({0.5: 0.4, 0.7: 0.3, 1.0: 0.02}, {"dtype": "bfloat16"}, "temperature: .* at temperature 1"),
        (FAR, {"prompts_agree": False}, "template"),
        (FAR, {"fingerprints_agree": False}, "weights: the generator's are not those that were pushed"),
        (NEAR, {"dtype": "torch.bfloat16"}, "dtype: .*bfloat16, the learner in float32.*vllm_dtype: float32"),
        (FAR, {"dtype": "float32"}, "weights: the generator's are not the learner's"),
        (FAR, {}, "weights: the generator's are not the learner's"),
        (FAR, {"fingerprints_agree": True}, "weights that were not sampled, or the model around them"),
        (
            {0.5: 3.0, 0.7: 2.0, 1.0: 2.5},
            {"dtype": "bfloat16"},
            "weights: the generator's are not the learner's",
        ),
        ({0.7: math.nan, 1.0: math.nan}, {}, "weights"),
    ],
)
def test_the_cause_is_named(tried: Mapping[float, float], known: dict[str, Any], cause: str) -> None:
    import re

    said = told(tried, **known)
    assert re.search(f"What differs is (the )?{cause}|what differs is (the )?{cause}", said), said
    named = {word for word in ("temperature:", "template:", "dtype:", "weights:") if word in said}
    assert len(named) <= 1, said


# ---- a real learner


def test_the_learner_scores_at_any_temperature(model: Path) -> None:  # noqa: F811
    from transformers import AutoModelForCausalLM

    trained = learner(model)
    prompt, ids = (3, 4, 5), (6, 7, 8, 9)
    rows = packed(trained, (Piece(prompt, (Row(0, ids, (0.0,) * 4, 1.0, 1.0),)),), ())
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = lm(torch.tensor([[*prompt, *ids]])).logits[0, 2:-1]
    for temperature in (1.0, 0.5):
        found, padding = trained.logprobs_at(rows, temperature)
        wanted = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        assert torch.allclose(found, wanted, atol=1e-5) and len(padding) == 1
        assert not found.requires_grad
    assert trained.model.temperature == ASKED


# ---- a real engine


def sampled(server: Server, requests: Sequence[Request], temperature: float) -> list[Completion]:
    generator = VllmGenerator(
        urls=[server.url],
        secret=server.secret,
        sync=Held(server.url),
        decode=lambda ids: "",
        stop_token_ids=[1],
        max_concurrency=16,
        request_timeout_seconds=120.0,
        server_timeout_seconds=30.0,
        max_staleness=0,
        stopping=lambda: False,
        starved=lambda: pytest.fail("the engine holds the weights"),
        moved=lambda: None,
    )
    generator.update_weights(lambda: [], 0)
    return generator.generate(requests, Sampling(temperature, 24))


@pytest.fixture(scope="module")
def held(engine: Server, tmp_path_factory: pytest.TempPathFactory) -> Server:  # noqa: F811
    """The session's engine with the weights of its own model folder, as version 0."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    engine.push(loaded, 0, tmp_path_factory.mktemp("push"))
    return engine


def rows_at(server: Server, trained: FsdpLearner, temperature: float) -> Any:
    requests = made_requests(16)
    completions = sampled(server, requests, temperature)
    first, second = micro_batch(requests[:8], completions[:8]), micro_batch(requests[8:], completions[8:])
    return packed(trained, first, second, ())


@pytest.mark.slow
def test_an_engine_in_float32_agrees(held: Server) -> None:
    trained = learner(held.model)
    found = checked(trained, rows_at(held, trained, ASKED), dtype="float32")
    assert found.mean < 2e-5 and found.max < 2e-4 and found.tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_engine_at_another_temperature_is_found_out(held: Server, temperature: float) -> None:
    trained = learner(held.model)
    rows = rows_at(held, trained, temperature)
    with pytest.raises(ParityError, match=f"differs is the temperature: .* at temperature {temperature:g} "):
        checked(trained, rows, dtype="float32", fingerprints_agree=True)


@pytest.mark.slow
@pytest.mark.parametrize("known", [{}, {"fingerprints_agree": False}], ids=str)
def test_other_weights_are_found_out(held: Server, tmp_path: Path, known: dict[str, Any]) -> None:
    """A hundredth of the weights' own size is enough."""
    from hpcgrpo import tiny

    other = tiny.build_tiny_model()
    with torch.no_grad():
        draws = torch.Generator().manual_seed(1)
        for parameter in other.parameters():
            parameter += 1e-3 * torch.randn(parameter.shape, generator=draws)
    tiny.save(other, tiny.build_character_tokenizer(), tmp_path / "other")
    trained = learner(tmp_path / "other")
    rows = rows_at(held, trained, ASKED)
    with pytest.raises(ParityError, match="differs is the weights"):
        checked(trained, rows, dtype="float32", **known)


@pytest.mark.slow
def test_an_engine_in_bfloat16_is_found_out(held: Server, tmp_path: Path) -> None:
    trained = learner(held.model)
    with serving(tmp_path, held.model, dtype="bfloat16") as coarse:
        body = {"version": 0}  # it has read the same folder
        httpx.post(f"{coarse.url}/hpcgrpo/version", json=body, headers=coarse.headers).raise_for_status()
        rows = rows_at(coarse, trained, ASKED)
    with pytest.raises(ParityError, match=r"differs is the dtype: .*bfloat16, the learner in float32"):
        checked(trained, rows, dtype="bfloat16", fingerprints_agree=True)
    assert checked(trained, rows, dtype="bfloat16", learner_dtype="bfloat16").mean < 0.05
