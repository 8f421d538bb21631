"""Which request goes to which engine, and when: longest expected first, a question's requests on one engine.

An engine reads a prompt once and keeps its keys and values: the further completions of the group, and the prompts of
the second stage, which begin with the same tokens, cost it no more than what differs. Elsewhere they would be read
from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from statistics import fmean

from hpcgrpo.types import Request

AHEAD = 8  # requests that an engine may have more than the least busy one before it loses the rest of a group


class Lengths:
    """What is known of the lengths of completions: each question's mean, of the last time it was asked."""

    def __init__(self) -> None:
        self.means: dict[int, float] = {}  # tokens, by `Request.question`

    def order(self, requests: Sequence[Request]) -> list[list[int]]:
        """The requests' numbers, those of a question together: longest expected completion first, then longest prompt.

        A question that nothing is known of counts as the mean of the others.
        """
        groups: dict[Hashable, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(question(request), []).append(i)
        firsts = {numbers[0]: requests[numbers[0]] for numbers in groups.values()}
        known = {i: self.means[r.question] for i, r in firsts.items() if r.question in self.means}
        usual = fmean(known.values()) if known else 0.0
        return sorted(
            groups.values(),
            key=lambda numbers: (
                -known.get(numbers[0], usual),
                -len(firsts[numbers[0]].prompt_token_ids),
            ),
        )

    def learn(self, seen: Mapping[int, Sequence[int]]) -> None:
        """Take the lengths of one call's completions, by question."""
        self.means.update({question: fmean(lengths) for question, lengths in seen.items()})


def question(request: Request) -> Hashable:
    """What is kept together: the question that a request belongs to, else its prompt."""
    return request.prompt_token_ids if request.question is None else request.question


class Schedule:
    """The requests of one call that are still to be sent.

    An engine takes a whole group when it is the least busy one, and that group's requests from there on. So the
    engines stay equally busy, and a group is split only where its engine falls `AHEAD` requests behind or is out.
    """

    def __init__(
        self, groups: Iterable[list[int]], requests: Sequence[Request], homes: dict[Hashable, str]
    ) -> None:
        """`homes`: the engines that have read a question's prompt already; what is learnt here is noted there."""
        self.requests, self.homes = requests, homes
        self._again: deque[tuple[int, str]] = deque()  # requests that failed, and where
        self._begun: dict[str, deque[int]] = {}  # rest of the group that an engine is at
        self._groups: dict[str | None, deque[list[int]]] = {}  # not begun yet, by home
        for group in groups:
            self._groups.setdefault(homes.get(question(requests[group[0]])), deque()).append(group)
        self.left = sum(len(group) for waiting in self._groups.values() for group in waiting)

    def repeat(self, i: int, failed: str) -> None:
        """Send request `i` once more, and first; not to the engine that failed it while there is another."""
        self._again.appendleft((i, failed))
        self.left += 1

    def take(self, loads: Mapping[str, int]) -> tuple[int, str]:
        """The next request and the engine it goes to; `loads`: requests in flight at each engine that may be asked."""
        assert self.left and loads
        self.left -= 1
        if self._again:
            i, failed = self._again.popleft()
            return i, min(loads, key=lambda url: (url == failed, loads[url]))
        least = min(loads, key=loads.__getitem__)
        if not self._begun.get(least) and (group := self._next_group(least)):
            self.homes[question(self.requests[group[0]])] = least
            self._begun[least] = deque(group)
        if self._begun.get(least):
            return self._begun[least].popleft(), least
        behind = max(self._begun, key=lambda url: len(self._begun[url]))
        keeps = behind in loads and loads[behind] < loads[least] + AHEAD
        return self._begun[behind].popleft(), behind if keeps else least

    def _next_group(self, url: str) -> list[int] | None:
        """A group that this engine has read before, else one that none has, else another's."""
        others = sorted(self._groups, key=lambda home: -len(self._groups[home]))
        for home in (url, None, *others):
            if self._groups.get(home):
                return self._groups[home].popleft()
        return None
