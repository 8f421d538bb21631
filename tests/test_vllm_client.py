"""The client of the vLLM engines: what it asks, and what it does when engines fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgrpo.generation.decoded import Decoded
from hpcgrpo.generation.vllm import VllmGenerator
from hpcgrpo.types import Completion, Request, Sampling, Stopped

SECRET = "5eC7e7"
PROGRAM = Path(__file__).parent / "programs" / "stand_in_engine.py"
LENGTH = 5
SAMPLING = Sampling(0.7, LENGTH)


class StandIn:
    """A stand-in engine in a process of its own."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        """On the port that it had before, if it had one."""
        command = [sys.executable, str(PROGRAM), SECRET, str(self.port)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def call(self, path: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        from urllib.request import Request as Asked
        from urllib.request import urlopen

        raw = None if data is None else json.dumps(data).encode()
        with urlopen(Asked(self.url + path, data=raw), timeout=60) as response:
            return json.load(response)

    def script(self, **state: Any) -> None:
        """Set its `version`, the `faults` of the next completions, or what `always` befalls them."""
        self.call("/script", state)

    def log(self) -> dict[str, Any]:
        return self.call("/log")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Pushes:
    """A sync that sets the stand-ins' versions; `url` in `broken` does not take it."""

    def __init__(self, engines: Sequence[StandIn]) -> None:
        self.engines, self.broken = engines, set[str]()
        self.count = 0

    def push(self, tensors: Any, version: int) -> list[str]:
        self.count += 1
        holding = [e for e in self.engines if e.process.poll() is None and e.url not in self.broken]
        for engine in holding:
            engine.script(version=version)
        return [e.url for e in holding]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[StandIn]]:
    started = [StandIn(), StandIn()]
    yield started
    for engine in started:
        engine.kill()


@pytest.fixture
def engines(pair: list[StandIn]) -> list[StandIn]:
    """Two stand-ins that nothing was asked of yet."""
    for engine in pair:
        if engine.process.poll() is not None:
            engine.start()
        engine.script(faults=[], always={}, asked=[], counters={}, peak=0, cancelled=0, connections=0)
    return pair


def client(engines: Sequence[StandIn], version: int = 3, **changes: Any) -> VllmGenerator:
    settings: dict[str, Any] = {
        "urls": [e.url for e in engines],
        "secret": SECRET,
        "sync": Pushes(engines),
        "decode": lambda ids: " ".join(map(str, ids)),
        "stop_token_ids": {7, 2},
        "max_concurrency": 8,
        "request_timeout_seconds": 20.0,
        "server_timeout_seconds": 10.0,
        "max_staleness": 0,
        "stopping": lambda: False,
        "starved": lambda: pytest.fail("no engine is stale"),
        "moved": lambda: None,
    }
    generator = VllmGenerator(**{**settings, **changes})
    generator.update_weights(lambda: [], version)
    return generator


def made_requests(count: int) -> list[Request]:
    return [Request(tuple(range(1, 4 + i % 5)), 100 * i) for i in range(count)]


def expected(request: Request) -> tuple[int, ...]:
    """What the stand-in answers: it counts up from the sum of prompt and seed."""
    start = (sum(request.prompt_token_ids) + request.seed) % 1000
    return tuple(range(start, start + LENGTH))


def asked(engine: StandIn) -> int:
    """How many completions an engine was asked for."""
    return len(engine.log()["asked"])


def until(met: Callable[[], bool]) -> None:
    """Wait for it, for a minute at most."""
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)


def answered(completions: Iterable[Completion]) -> list[tuple[int, ...]]:
    return [c.token_ids for c in completions]


def wanted(requests: Iterable[Request]) -> list[tuple[int, ...]]:
    return [expected(r) for r in requests]


# ---- what is asked


def test_answers_come_in_the_order_of_the_requests(engines: list[StandIn]) -> None:
    requests, moved = made_requests(40), []
    generator = client(engines, moved=lambda: moved.append(1))
    completions = generator.generate(requests, SAMPLING)
    assert answered(completions) == wanted(requests)
    first = completions[0]
    assert first == Completion(
        token_ids=(6, 7, 8, 9, 10), logprobs=(-0.5,) * 5, finish_reason="length", text="6 7 8 9 10", seed=0,
        weights_version=3,
    )  # fmt: skip
    assert len(moved) == 40 and generator.dropped == 0
    assert generator.generate([], SAMPLING) == []


def test_a_request_says_all_that_sampling_depends_on(engines: list[StandIn]) -> None:
    generator = client(engines[:1], version=4, max_staleness=1)
    generator.generate([Request((5, 6), 2**63 + 9)], Sampling(0.7, 3))
    generator.generate([Request((5, 6), 9)], Sampling(0.0, 3))
    sampled, greedy = engines[0].log()["asked"]
    assert sampled == {
        "model": "policy", "prompt": [5, 6], "n": 1, "max_tokens": 3, "temperature": 0.7, "top_p": 1.0,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "logprobs": 0, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "ignore_eos": True, "stop_token_ids": [2, 7], "seed": 9,
        "minimum": "3",
    }  # fmt: skip
    assert greedy["temperature"] == 0 and "seed" not in greedy


def test_a_cut_distribution_is_asked_for(engines: list[StandIn]) -> None:
    client(engines[:1]).generate([Request((5, 6), 9)], Sampling(0.6, 3, top_p=0.95, top_k=20))
    said = engines[0].log()["asked"][0]
    assert (said["temperature"], said["top_p"], said["top_k"]) == (0.6, 0.95, 20)


def test_completions_are_streamed_as_they_come(engines: list[StandIn]) -> None:
    requests, arrived = made_requests(30), {}
    client(engines).stream(requests, SAMPLING, arrived.__setitem__)
    assert answered([arrived[i] for i in range(30)]) == wanted(requests)
    with pytest.raises(OSError, match="No space left"):
        client(engines).stream(requests, SAMPLING, full_disk)


def full_disk(number: int, completion: Completion) -> None:
    raise OSError("No space left on device")


def test_what_each_engine_decoded_is_counted_for_itself(engines: list[StandIn]) -> None:
    generator, requests = client(engines), made_requests(20)
    for _ in range(2):
        generator.generate(requests, SAMPLING)
    found = generator.take_decoded()
    assert found.keys() == {e.url for e in engines}
    # every answer is of LENGTH tokens; the two calls follow one another
    assert {decoded.steps for decoded in found.values()} == {2 * (LENGTH - 1)}
    read = sum(len(r.prompt_token_ids) + i for r in requests for i in range(1, LENGTH))
    assert sum(decoded.pairs for decoded in found.values()) == 2 * read
    assert generator.take_decoded() == {}
    alone = client(engines[:1])
    alone.generate(requests[:1], SAMPLING)
    assert alone.take_decoded() == {engines[0].url: Decoded.side_by_side([(3, LENGTH)])}


def test_load_is_shared_and_bounded(engines: list[StandIn]) -> None:
    for engine in engines:
        engine.script(always={"seconds": 0.2})
    requests = [Request((1, 2, i), i) for i in range(30)]  # nothing to keep together
    client(engines, max_concurrency=6).generate(requests, SAMPLING)
    logs = [e.log() for e in engines]
    assert [log["peak"] for log in logs] == [3, 3]
    assert sum(len(log["asked"]) for log in logs) == 30
    # a connection is kept for the next request: 3 in flight need no more; the other 4 are this test's
    assert all(log["connections"] <= 3 + 4 for log in logs)


def test_the_longest_prompts_go_first(engines: list[StandIn]) -> None:
    client(engines[:1], max_concurrency=1).generate(made_requests(10), SAMPLING)
    lengths = [len(a["prompt"]) for a in engines[0].log()["asked"]]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 7


def test_a_group_stays_on_one_engine_and_its_second_stage_with_it(engines: list[StandIn]) -> None:
    """Ten questions of four, then prompts that hold a draft: each engine gets five whole groups of both, the same."""
    generator = client(engines, max_concurrency=80)
    first = [Request((9, q), q * 4 + i, question=q) for q in range(10) for i in range(4)]
    second = [Request((9, q, 3, 3), q * 4 + i, question=q) for q in reversed(range(10)) for i in range(4)]
    seen = []
    for requests in (first, second):
        for engine in engines:
            engine.script(asked=[], always={"seconds": 0.02})
        assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
        came = [[a["prompt"][1] for a in e.log()["asked"]] for e in engines]
        assert [len(questions) for questions in came] == [20, 20]
        homes = [set(questions) for questions in came]
        assert not homes[0] & homes[1]
        seen.append(homes)
    assert seen[0] == seen[1]


def test_what_took_longest_the_last_time_goes_first(engines: list[StandIn]) -> None:
    generator = client(engines[:1], max_concurrency=1)
    requests = [Request((1, q), q, question=q) for q in range(4)]
    engines[0].script(faults=[{"tokens": n, "choice": {"finish_reason": "stop"}} for n in (2, 4, 1, 3)])
    generator.generate(requests, SAMPLING)
    engines[0].script(asked=[])
    generator.update_weights(lambda: [], 3)
    generator.generate(requests, SAMPLING)
    assert [a["prompt"][1] for a in engines[0].log()["asked"]] == [1, 3, 0, 2]


def test_engines_tell_how_much_of_the_prompts_they_had_read(engines: list[StandIn]) -> None:
    """60 + 20 of 100 + 60 tokens; then 30 of 100 and, of an engine that was started again, 9 of 10."""
    generator = client(engines)
    for counts, rate in ((((100, 60), (60, 20)), 0.5), (((200, 90), (10, 9)), 39 / 110)):
        for engine, (queries, hits) in zip(engines, counts, strict=True):
            engine.script(counters={"queries": queries, "hits": hits})
        assert generator.metrics() == {"generation/prefix_cache_hit_rate": rate}
    assert generator.metrics() == {}
    engines[1].kill()
    engines[0].script(counters={"queries": 204, "hits": 91})
    assert generator.metrics() == {"generation/prefix_cache_hit_rate": 0.25}


def test_a_thousand_completions_take_under_three_cpu_seconds(engines: list[StandIn]) -> None:
    generator = client(engines, max_concurrency=128)
    began = time.process_time()
    generator.generate(made_requests(1000), Sampling(0.7, 64))
    assert time.process_time() - began < 3


# ---- requests that go wrong


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 503},
        {"hang_up": True},
        {"choice": {"finish_reason": "abort"}},
    ],
    ids=str,
)
def test_one_bad_answer_costs_a_repetition(engines: list[StandIn], fault: dict[str, Any]) -> None:
    engines[0].script(faults=[fault])
    requests = made_requests(12)
    generator = client(engines)
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
    assert sum(len(e.log()["asked"]) for e in engines) == 13
    assert generator.dropped == 0


def test_a_completion_that_older_weights_ended_is_not_used(engines: list[StandIn]) -> None:
    engines[0].script(faults=[{"becomes": 1}])
    requests = made_requests(12)
    completions = client(engines).generate(requests, SAMPLING)
    assert answered(completions) == wanted(requests)
    assert {c.weights_version for c in completions} == {3}


def test_only_the_lost_requests_are_asked_again(engines: list[StandIn]) -> None:
    """Killed with all of its requests in flight; the other engine answers those besides its own, each once."""
    engines[0].script(always={"seconds": 60})
    generator = client(engines, request_timeout_seconds=120.0)

    def kill() -> None:
        until(lambda: sum(map(asked, engines)) == 8)
        engines[0].kill()

    thread = threading.Thread(target=kill)
    thread.start()
    requests = made_requests(8)
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
    thread.join()
    assert len(engines[1].log()["asked"]) == 8


def test_a_request_that_is_refused_is_dropped_and_counted(engines: list[StandIn]) -> None:
    """The longest prompt is asked first, so the fault is its own."""
    engines[0].script(faults=[{"status": 400, "message": "the prompt is too long"}])
    requests = [Request((1,), 1), Request((1, 2, 3), 2), Request((4,), 3)]
    generator = client(engines[:1])
    completions = generator.generate(requests, SAMPLING)
    assert completions[1] == Completion((), (), "abort", "", seed=2)
    assert answered(completions) == [expected(requests[0]), (), expected(requests[2])]
    assert generator.dropped == 1 and list(generator.drop_reasons) == ["400 the prompt is too long"]


def test_an_answer_cut_for_want_of_room_is_dropped(engines: list[StandIn]) -> None:
    engines[0].script(faults=[{"tokens": 2}])
    generator = client(engines[:1])
    completions = generator.generate([Request((1, 2), 0), Request((1,), 0)], SAMPLING)
    assert [c.finish_reason for c in completions] == ["abort", "length"]
    assert "2 of 5 tokens" in generator.drop_reasons[0] and "max_model_len" in generator.drop_reasons[0]


def test_a_request_that_fails_three_times_is_dropped(engines: list[StandIn]) -> None:
    engines[0].script(faults=[{"status": 500}] * 3)
    generator = client(engines[:1], max_concurrency=1)
    completions = generator.generate([Request((1, 2), 0), Request((1,), 0)], SAMPLING)
    assert [c.finish_reason for c in completions] == ["abort", "length"]
    assert generator.dropped == 1 and "500 broken" in generator.drop_reasons[0]
    assert len(engines[0].log()["asked"]) == 4


def test_a_slow_answer_is_given_up_and_asked_elsewhere(engines: list[StandIn]) -> None:
    engines[0].script(faults=[{"seconds": 600}])
    generator = client(engines, request_timeout_seconds=4)
    requests = made_requests(4)
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
    until(lambda: engines[0].log()["cancelled"] == 1)


@pytest.mark.parametrize(
    "fault",
    [{"status": 500}, {"status": 404, "message": "no such model"}, {"status": 400, "message": "too long"}],
    ids=str,
)
def test_engines_that_answer_nothing_end_the_run(engines: list[StandIn], fault: dict[str, Any]) -> None:
    for engine in engines:
        engine.script(always=fault)
    with pytest.raises(RuntimeError, match=f"none of 3 requests: .*{fault.get('message', '500 broken')}"):
        client(engines).generate(made_requests(3), SAMPLING)


def test_a_lone_prompt_that_is_refused_does_not_end_the_run(engines: list[StandIn]) -> None:
    engines[0].script(always={"status": 400, "message": "too long"})
    generator = client(engines[:1])
    completions = generator.generate([Request((1, 2), i) for i in range(4)], SAMPLING)
    assert [c.finish_reason for c in completions] == ["abort"] * 4 and generator.dropped == 4


def test_the_wrong_secret_ends_the_run_at_once(engines: list[StandIn]) -> None:
    with pytest.raises(RuntimeError, match=r"refuses this run's secret: .*slurm/secret"):
        client(engines, secret="other").generate(made_requests(3), SAMPLING)
    assert all(not e.log()["asked"] for e in engines)


def test_another_prompt_than_was_sent_ends_the_run(engines: list[StandIn]) -> None:
    engines[0].script(always={"choice": {"prompt_token_ids": [1, 1, 2, 3]}})
    with pytest.raises(ValueError, match=r"other prompt tokens than were sent \(\[1, 1, 2, 3\]"):
        client(engines[:1]).generate([Request((1, 2, 3), 0)], SAMPLING)


@pytest.mark.parametrize("value", [float("nan"), None])
def test_logprobs_that_are_no_numbers_end_the_run(engines: list[StandIn], value: float | None) -> None:
    engines[0].script(always={"choice": {"logprobs": {"token_logprobs": [-1.0] * 4 + [value]}}})
    with pytest.raises(ValueError, match="not finite: its weights hold NaN"):
        client(engines[:1]).generate(made_requests(1), SAMPLING)


def test_an_answer_without_token_ids_names_the_version(engines: list[StandIn]) -> None:
    engines[0].script(always={"choice": {"logprobs": None}})
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32"):
        client(engines[:1]).generate(made_requests(1), SAMPLING)


# ---- engines that hold other weights, or are gone


def test_nothing_is_sampled_before_weights_were_pushed(engines: list[StandIn]) -> None:
    generator = client(engines)
    generator.weights_version = None
    with pytest.raises(ValueError, match="update_weights before generate"):
        generator.generate(made_requests(1), SAMPLING)


def test_a_stale_engine_is_left_out_until_it_holds_the_weights(engines: list[StandIn]) -> None:
    generator = client(engines)
    engines[0].script(version=None)
    engines[1].script(faults=[{}] * 40, always={"seconds": 3})  # the last ones wait for the other engine
    requests = made_requests(60)

    def take_the_weights() -> None:
        until(lambda: asked(engines[1]) >= 40)
        engines[0].script(version=3)

    later = threading.Thread(target=take_the_weights)
    later.start()
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
    later.join()
    counts = [asked(engine) for engine in engines]
    # the first four found out; the rest came only once its state said so
    assert counts[1] >= 40 and counts[0] > 4 and sum(counts) == 64
    engines[1].script(always={})
    generator.generate(made_requests(4), SAMPLING)
    assert asked(engines[0]) == counts[0] + 2


def test_an_engine_that_did_not_take_the_push_is_not_asked(engines: list[StandIn]) -> None:
    generator = client(engines)
    pushes = generator.sync
    assert isinstance(pushes, Pushes)
    pushes.broken = {engines[1].url}
    generator.update_weights(lambda: [], 4)
    completions = generator.generate(made_requests(6), SAMPLING)
    assert {c.weights_version for c in completions} == {4}
    assert [len(e.log()["asked"]) for e in engines] == [6, 0]


def test_weights_as_stale_as_allowed_are_used(engines: list[StandIn]) -> None:
    generator = client(engines[:1], version=3, max_staleness=1)
    engines[0].script(version=2)
    assert [c.weights_version for c in generator.generate(made_requests(2), SAMPLING)] == [2, 2]
    engines[0].script(version=1)
    generator.starved = lambda: generator.update_weights(lambda: [], 3)
    assert [c.weights_version for c in generator.generate(made_requests(2), SAMPLING)] == [3, 3]


def test_where_all_are_stale_the_weights_are_pushed_again(engines: list[StandIn]) -> None:
    calls = []

    def starved() -> None:
        calls.append(1)
        generator.update_weights(lambda: [], 3)

    generator = client(engines, starved=starved)
    for engine in engines:
        engine.script(version=None)
    requests = made_requests(10)
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
    assert calls == [1]


def test_a_lone_engine_that_dies_is_waited_for(engines: list[StandIn]) -> None:
    """Killed with requests in flight and started again: it is stale, gets the weights, then the lost requests."""
    engine = engines[0]
    engine.script(faults=[{}] * 4, always={"seconds": 60})
    pushes = Pushes([engine])
    generator = client(
        [engine], sync=pushes, max_concurrency=4, request_timeout_seconds=120.0, server_timeout_seconds=60.0
    )
    generator.starved = lambda: generator.update_weights(lambda: [], 3)

    def restart() -> None:
        until(lambda: asked(engine) == 8)  # four were answered, four wait
        engine.kill()
        time.sleep(1)
        engine.start()  # with version 0

    thread = threading.Thread(target=restart)
    thread.start()
    requests = made_requests(12)
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
    thread.join()
    assert pushes.count == 2
    assert asked(engine) == 8


def test_engines_that_stay_away_are_named(engines: list[StandIn]) -> None:
    generator = client(engines, server_timeout_seconds=1.0)
    for engine in engines:
        engine.kill()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="no vLLM engine answered within 1 s") as caught:
        generator.generate(made_requests(3), SAMPLING)
    assert 1 <= time.monotonic() - began < 30
    assert all(e.url in str(caught.value) for e in engines) and "Connection refused" in str(caught.value)


def test_weights_that_never_stay_end_the_run(engines: list[StandIn]) -> None:
    calls = []
    generator = client(engines, starved=lambda: calls.append(1))
    for engine in engines:
        engine.script(version=None)
    with pytest.raises(
        RuntimeError, match=r"take no request although they answer.*holds version None, not 3"
    ):
        generator.generate(made_requests(3), SAMPLING)
    assert len(calls) == 2


# ---- the end of the run


def test_a_run_that_stops_leaves_at_once(engines: list[StandIn]) -> None:
    for engine in engines:
        engine.script(always={"seconds": 600})
    generator = client(engines, request_timeout_seconds=600.0)
    generator.stopping = lambda: sum(map(asked, engines)) == 6
    began = time.monotonic()
    with pytest.raises(Stopped):
        generator.generate(made_requests(6), SAMPLING)
    assert time.monotonic() - began < 60
    until(lambda: sum(e.log()["cancelled"] for e in engines) == 6)


def test_a_run_that_stops_does_not_wait_for_engines(engines: list[StandIn]) -> None:
    generator = client(engines, server_timeout_seconds=600.0)
    for engine in engines:
        engine.kill()
    began = time.monotonic()
    generator.stopping = lambda: time.monotonic() - began > 1
    with pytest.raises(Stopped):
        generator.generate(made_requests(3), SAMPLING)
    assert time.monotonic() - began < 60


def test_proxies_of_the_environment_are_not_asked(
    engines: list[StandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setitem(os.environ, name, "http://127.0.0.1:9")
    requests = made_requests(2)
    generator = client(engines[:1], sync=type("Held", (), {"push": lambda *_: [engines[0].url]})(), version=0)
    assert answered(generator.generate(requests, SAMPLING)) == wanted(requests)
