"""One start of a run, as its nodes and ranks share it: a folder of flags, notes and logs.

What a node writes for its own ranks stands in files of that node, since another node may see a file late.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcgrpo.journal import write_atomically

BEAT_SECONDS = 1.0


@dataclass
class Attempt:
    """The folder `<run>/slurm/<job>.<restart>` as one node sees it."""

    folder: Path
    node: int
    beaten: float = field(default=0.0, repr=False)

    @classmethod
    def of_environment(cls) -> Attempt | None:
        """The attempt that this process belongs to; None outside a job."""
        folder = os.environ.get("HPCGRPO_ATTEMPT")
        return cls(Path(folder), int(os.environ.get("HPCGRPO_NODE", "0"))) if folder else None

    # ---- stop flags: set by the node's launcher, polled by its ranks

    def request_stop(self, reason: str, *, urgent: bool) -> None:
        """Ask this node's ranks to save and end: at the end of the step, or `urgent`: now."""
        before = self.stop_request()
        if before is None or (urgent and not before["urgent"]):
            write_atomically(self._stop, json.dumps({"reason": reason, "urgent": urgent}))

    def stop_request(self) -> dict[str, Any] | None:
        """{"reason", "urgent"} once a stop was asked for."""
        return _read(self._stop)

    def forget_stop(self) -> None:
        """Take the request back: a new start in the same folder."""
        self._stop.unlink(missing_ok=True)

    def urgent(self) -> bool:
        """Whether the ranks are to stop without finishing their step."""
        return bool((self.stop_request() or {}).get("urgent"))

    @property
    def _stop(self) -> Path:
        return self.folder / f"stop-{self.node}"

    # ---- movement: any rank of the node did something

    def beat(self) -> None:
        """Note that this node moves; cheap, and written once a second at most."""
        if time.monotonic() - self.beaten >= BEAT_SECONDS:
            self.beaten = time.monotonic()
            with suppress(OSError):  # a full disk is found elsewhere
                self._beat.touch()

    def moved_at(self) -> float:
        """When a rank of this node last moved, in epoch seconds; 0 before any did."""
        try:
            return self._beat.stat().st_mtime
        except OSError:
            return 0.0

    @property
    def _beat(self) -> Path:
        return self.folder / f"beat-{self.node}"

    # ---- returns: the node's first rank got to the end of its work, and was not ended by what it called

    def forget_return(self) -> None:
        """Take the sign away: a new start in the same folder."""
        self._return.unlink(missing_ok=True)

    def note_return(self) -> None:
        """Leave the sign; it is an empty file, for which a full disk has room."""
        self._return.touch()

    def returned(self) -> bool:
        """Whether the sign is there."""
        return self._return.exists()

    @property
    def _return(self) -> Path:
        return self.folder / f"returned-{self.node}"

    # ---- notes

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Write `<name>.json` of this node."""
        write_atomically(self.folder / f"{name}-{self.node}.json", json.dumps(values, indent=1))

    def read(self, name: str) -> dict[str, Any] | None:
        """`<name>.json` of this node, None where there is none."""
        return _read(self.folder / f"{name}-{self.node}.json")

    # ---- the lease: only the run's latest attempt may write into the run's folder

    def take_lease(self) -> bool:
        """Make this the run's attempt; False where a later start of the same job has done so already."""
        holder = (_read(self._lease) or {}).get("attempt", "")
        job, _, restart = self.folder.name.rpartition(".")
        if holder.rpartition(".")[0] == job and int(holder.rpartition(".")[2]) > int(restart):
            return False
        write_atomically(self._lease, json.dumps({"attempt": self.folder.name, "time": time.time()}))
        return True

    def holds_lease(self) -> bool:
        """Whether no other attempt has taken over; an unreadable file settles nothing."""
        held = _read(self._lease)
        return held is None or held.get("attempt") == self.folder.name

    def leased_at(self) -> float | None:
        """When the run's latest attempt began, in epoch seconds; None outside a job."""
        found = (_read(self._lease) or {}).get("time")
        return float(found) if isinstance(found, int | float) else None

    @property
    def _lease(self) -> Path:
        return self.folder.parent / "lease.json"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
