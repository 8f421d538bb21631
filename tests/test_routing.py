"""Which request goes where, and when: the schedule alone, against hand-worked orders."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hpcgrpo.generation.routing import AHEAD, Lengths, Schedule
from hpcgrpo.types import Request


def asked(*groups: Sequence[int], size: int = 2) -> list[Request]:
    """`size` requests of each prompt, the prompt's first token being its question."""
    return [Request(tuple(prompt), i, question=prompt[0]) for prompt in groups for i in range(size)]


def schedule(requests: Sequence[Request], homes: dict[object, str] | None = None) -> Schedule:
    return Schedule(Lengths().order(requests), requests, {} if homes is None else homes)


def taken(work: Schedule, loads: dict[str, int]) -> list[tuple[int, str]]:
    """All that is left, each sent as soon as it is taken and none of it answered."""
    said = []
    while work.left:
        i, url = work.take(loads)
        loads[url] += 1
        said.append((i, url))
    return said


def test_nothing_known_the_longest_prompts_go_first_and_groups_together() -> None:
    requests = [Request((1,), 0), Request((2, 2, 2), 0), Request((1,), 1), Request((3, 3), 0)]
    assert Lengths().order(requests) == [[1], [3], [0, 2]]


def test_the_longest_of_the_last_time_go_first_and_the_unknown_among_them() -> None:
    lengths = Lengths()
    lengths.learn({1: [10, 30], 2: [60, 60], 3: [5]})  # means 20, 60, 5; 4 is new: their mean, 28.3
    requests = asked([1], [3], [4], [2], size=1)
    assert lengths.order(requests) == [[3], [2], [0], [1]]
    lengths.learn({2: [1]})
    assert lengths.order(requests)[-1] == [3]


def test_each_engine_takes_whole_groups() -> None:
    homes: dict[object, str] = {}
    work = schedule(asked([1, 0], [2, 0], [3, 0], [4, 0]), homes)
    assert taken(work, {"a": 0, "b": 0}) == [
        (0, "a"), (2, "b"), (1, "a"), (3, "b"), (4, "a"), (6, "b"), (5, "a"), (7, "b"),
    ]  # fmt: skip
    assert homes == {1: "a", 2: "b", 3: "a", 4: "b"}


def test_a_group_goes_where_its_question_was_read() -> None:
    homes = {1: "b", 2: "a", 3: "gone"}
    sent = taken(schedule(asked([1], [2], [3]), dict(homes)), {"a": 0, "b": 0})
    assert {url for i, url in sent if i in (0, 1)} == {"b"} and {url for i, url in sent if i in (2, 3)} == {
        "a"
    }
    assert len({url for i, url in sent if i in (4, 5)}) == 1  # its engine is gone: another takes it whole


def test_a_group_is_split_where_its_engine_falls_behind() -> None:
    """One question alone: its engine keeps AHEAD of them, the others get as many less."""
    count = 3 * AHEAD
    sent = taken(schedule(asked([1], size=count)), {"a": 0, "b": 0})
    assert [url for _, url in sent[:AHEAD]] == ["a"] * AHEAD
    shares = [sum(url == name for _, url in sent) for name in "ab"]
    assert shares[0] - shares[1] in (AHEAD - 1, AHEAD) and sum(shares) == count


def test_a_failed_request_comes_next_and_elsewhere() -> None:
    work = schedule(asked([1], [2], size=1))
    first = work.take({"a": 0, "b": 0})
    work.repeat(*first)
    assert work.left == 2 and work.take({"a": 0, "b": 5}) == (first[0], "b")
    work.repeat(*first)
    assert work.take({"a": 0}) == first  # the only one


def test_an_engine_that_goes_leaves_its_group_to_the_others() -> None:
    work = schedule(asked([1], [2], size=3))
    assert work.take({"a": 0, "b": 1}) == (0, "a")
    sent = taken(work, {"b": 0})
    assert sorted(i for i, _ in sent) == [1, 2, 3, 4, 5] and {url for _, url in sent} == {"b"}


def test_every_request_is_sent_once_and_no_engine_runs_ahead() -> None:
    """Engines that answer at random, some with a home each: at no time is one more than AHEAD busier."""
    draws = random.Random(0)
    for _ in range(30):
        requests = asked(*([q, *[0] * draws.randrange(5)] for q in range(12)), size=draws.choice((1, 4, 8)))
        homes: dict[object, str] = {q: draws.choice("abc") for q in range(12) if draws.random() < 0.5}
        work, loads, sent = schedule(requests, homes), dict.fromkeys("abc", 0), []
        while work.left:
            i, url = work.take(loads)
            loads[url] += 1
            sent.append(i)
            assert loads[url] - min(loads.values()) <= AHEAD
            while sum(loads.values()) > 20:
                loads[draws.choice([u for u in loads if loads[u]])] -= 1
        assert sorted(sent) == list(range(len(requests)))
