"""How much of the prompts the engines had read before: their own counters, from one look to the next."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

COUNTER = r"^vllm:prefix_cache_{}_total(?:\{{[^}}]*\}})? (\S+)$"  # prompt tokens, in vLLM's /metrics


@dataclass
class PrefixCache:
    """Sums over all engines; one that was started again counts from nothing."""

    _seen: dict[str, tuple[float, float]] = field(default_factory=dict)  # queries and hits in all, by url
    _queries: float = 0.0  # since `rate` was last asked
    _hits: float = 0.0

    def read(self, url: str, metrics: str) -> None:
        """Take an engine's counters from what it answers to /metrics; without them nothing happens."""
        found = [re.findall(COUNTER.format(name), metrics, re.MULTILINE) for name in ("queries", "hits")]
        if not all(found):
            return
        queries, hits = (sum(map(float, values)) for values in found)
        before = self._seen.get(url, (0.0, 0.0))
        before = (0.0, 0.0) if queries < before[0] else before
        self._queries += queries - before[0]
        self._hits += hits - before[1]
        self._seen[url] = queries, hits

    def rate(self) -> float | None:
        """Prompt tokens that were read before, of all since the last call; None where no prompt came."""
        queries, hits = self._queries, self._hits
        self._queries = self._hits = 0.0
        return hits / queries if queries else None
