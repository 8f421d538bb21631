"""The client against a real vLLM engine: the same answers as the in-process generator, and its per-request errors."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_server import MODEL_LENGTH, Server, engine  # noqa: F401

from hpcgrpo.generation.transformers import TransformersGenerator
from hpcgrpo.generation.vllm import VllmGenerator
from hpcgrpo.types import Completion, Request, Sampling, Stopped, stable_seed

pytestmark = pytest.mark.slow
BLOCK = 128  # tokens that vLLM keeps or forgets together on a CPU
ENDS = {1, *range(20, 28)}  # so many that an untrained model comes across one


class Held:
    """A sync for weights that were pushed already."""

    def __init__(self, url: str) -> None:
        self.url = url

    def push(self, tensors: Any, version: int) -> list[str]:
        return [self.url]


@pytest.fixture(scope="module")
def model(engine: Server, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: F811
    """The engine's model in this process; its weights are pushed as version 0."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    engine.push(loaded, 0, tmp_path_factory.mktemp("push"))
    return loaded


@pytest.fixture
def generator(engine: Server, model: Any) -> VllmGenerator:  # noqa: F811
    made = VllmGenerator(
        urls=[engine.url],
        secret=engine.secret,
        sync=Held(engine.url),
        decode=lambda ids: " ".join(map(str, ids)),
        stop_token_ids=ENDS,
        max_concurrency=16,
        request_timeout_seconds=120.0,
        server_timeout_seconds=30.0,
        max_staleness=0,
        stopping=lambda: False,
        starved=lambda: pytest.fail("the engine holds the weights"),
        moved=lambda: None,
    )
    made.update_weights(lambda: [], 0)
    return made


def made_requests(count: int, seed: int = 0) -> list[Request]:
    draws = torch.Generator().manual_seed(seed)
    return [
        Request(
            tuple(torch.randint(3, 100, (3 + i % 9,), generator=draws).tolist()), stable_seed("request", i)
        )
        for i in range(count)
    ]


def apart(mine: Sequence[Completion], theirs: Sequence[Completion]) -> float:
    pairs = zip(mine, theirs, strict=True)
    return max(abs(a - b) for x, y in pairs for a, b in zip(x.logprobs, y.logprobs, strict=True))


def test_greedy_answers_are_those_of_the_in_process_generator(generator: VllmGenerator, model: Any) -> None:
    within = TransformersGenerator(model, decode=generator.decode, eos_token_ids=ENDS)
    requests = made_requests(24)
    mine = generator.generate(requests, Sampling(0.0, 24))
    theirs = within.generate(requests, Sampling(0.0, 24))
    assert [(c.token_ids, c.finish_reason, c.text, c.seed, c.weights_version) for c in mine] == [
        (c.token_ids, c.finish_reason, c.text, c.seed, c.weights_version) for c in theirs
    ]
    assert {c.finish_reason for c in mine} == {"stop", "length"}
    assert all(
        c.token_ids[-1] in ENDS and not ENDS & {*c.token_ids[:-1]} for c in mine if len(c.token_ids) < 24
    )
    assert apart(mine, theirs) < 1e-4


def test_logprobs_are_those_at_the_sampling_temperature(generator: VllmGenerator, model: Any) -> None:
    requests = made_requests(8)
    completions = generator.generate(requests, Sampling(0.7, 12))
    for request, completion in zip(requests, completions, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt_token_ids) - 1 : -1]
        chosen = (logits / 0.7).log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (chosen - torch.tensor(completion.logprobs)).abs().max() < 1e-4


def test_seeds_decide_what_is_sampled(generator: VllmGenerator) -> None:
    requests = made_requests(12)
    once, again = (generator.generate(requests, Sampling(1.0, 16)) for _ in range(2))
    assert [c.token_ids for c in once] == [c.token_ids for c in again]
    same_prompt = [Request(requests[0].prompt_token_ids, stable_seed("sample", i)) for i in range(12)]
    assert len({c.token_ids for c in generator.generate(same_prompt, Sampling(1.0, 16))}) == 12


def test_the_largest_seed_is_taken(generator: VllmGenerator) -> None:
    (completion,) = generator.generate([Request((5, 6), 2**63 - 1)], Sampling(1.0, 4))
    assert completion.finish_reason in ("stop", "length") and generator.dropped == 0


def test_a_prompt_that_is_too_long_is_dropped_and_the_others_stay(generator: VllmGenerator) -> None:
    requests = made_requests(6)
    requests[2] = Request((5,) * (MODEL_LENGTH + 1), 0)  # no room for the prompt
    requests[4] = Request(
        (5,) * (MODEL_LENGTH - 2), 0
    )  # room for 2 tokens of 8: the engine answers with those
    generator.stop_token_ids = [1]
    completions = generator.generate(requests, Sampling(0.0, 8))
    assert [i for i, c in enumerate(completions) if c.finish_reason == "abort"] == [2, 4]
    for i in (0, 1, 3, 5):  # a greedy answer may end before its eighth token
        ended = completions[i].token_ids[-1] == 1
        assert ended or len(completions[i].token_ids) == 8
    assert generator.dropped == 2
    assert sorted("max_model_len" in r or "maximum context length" in r for r in generator.drop_reasons) == [
        True, True,
    ]  # fmt: skip


def test_requests_that_are_given_up_end_in_the_engine(generator: VllmGenerator, engine: Server) -> None:  # noqa: F811
    generator.stopping = lambda: engine.state()["busy"] > 0  # 8 but for those that have just ended
    generator.stop_token_ids, generator.max_concurrency = [1], 8
    with pytest.raises(Stopped):
        generator.generate(made_requests(400), Sampling(1.0, 200))
    ended = time.monotonic()
    while engine.state()["busy"]:
        assert time.monotonic() - ended < 60
        time.sleep(0.1)


def test_a_prompt_is_read_once_for_its_group_and_its_second_stage(generator: VllmGenerator) -> None:
    """Eight of a prompt of 200 tokens, then four of one that begins with its first 190: all but the first find a
    whole block there."""
    prompt = tuple(3 + i * 7 % 90 for i in range(200))
    generator.metrics()
    generator.generate([Request(prompt, i, question=1) for i in range(8)], Sampling(1.0, 4))
    assert generator.metrics() == {"generation/prefix_cache_hit_rate": 7 * BLOCK / (8 * 200)}
    refined = (*prompt[:190], *[5] * 40)
    generator.generate([Request(refined, i, question=1) for i in range(4)], Sampling(1.0, 4))
    assert generator.metrics() == {"generation/prefix_cache_hit_rate": 4 * BLOCK / (4 * 230)}


@pytest.mark.parametrize("transport", ["process_group", "filesystem"])
def test_nothing_read_with_older_weights_is_used_after_an_update(
    generator: VllmGenerator,
    engine: Server,  # noqa: F811
    model: Any,
    tmp_path: Path,
    transport: str,
) -> None:
    """The same prompt before and after: no token of it is found, and the answers are the new weights' alone."""
    newer = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    requests = [Request(tuple(3 + i * 11 % 90 for i in range(200)), 0, question=2)]
    generator.generate(requests, Sampling(0.0, 16))
    for weights, version in ((newer, 1), (model, 2)):
        held = [(name, p.detach()) for name, p in weights.named_parameters()]
        sync = engine.sync(tmp_path, transport)
        assert sync.push(lambda held=held: held, version) == [engine.url]
        sync.close()
        generator.update_weights(lambda: [], version)
        generator.metrics()
        mine = generator.generate(requests, Sampling(0.0, 16))
        assert generator.metrics() == {"generation/prefix_cache_hit_rate": 0.0}
        within = TransformersGenerator(weights, decode=generator.decode, eos_token_ids=ENDS)
        theirs = within.generate(requests, Sampling(0.0, 16))
        assert [c.token_ids for c in mine] == [c.token_ids for c in theirs] and apart(mine, theirs) < 1e-4
    engine.push(model, 0, tmp_path)


def test_another_model_name_ends_the_run(generator: VllmGenerator) -> None:
    generator.model = "other"
    with pytest.raises(RuntimeError, match=r"none of 2 requests: .*404"):
        generator.generate(made_requests(2), Sampling(1.0, 4))


def test_a_stale_engine_is_pushed_to(
    generator: VllmGenerator,
    engine: Server,  # noqa: F811
    model: Any,
    tmp_path: Path,
) -> None:
    """The engine holds version 0, the step expects 5: the weights are pushed once, then all is answered."""
    requests, pushed = made_requests(4), []
    before = generator.generate(requests, Sampling(0.0, 8))

    def starved() -> None:
        engine.push(model, 5, tmp_path)
        pushed.append(5)

    generator.starved = starved
    generator.update_weights(lambda: [], 5)
    after = generator.generate(requests, Sampling(0.0, 8))
    assert pushed == [5] and {c.weights_version for c in after} == {5}
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    engine.push(model, 0, tmp_path)
