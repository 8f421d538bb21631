"""A function that is called while its arguments are still coming."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Early(Generic[T]):
    """Calls a function with the numbers that have come, in a thread of its own; while it is busy, the next ones gather.

    The thread starts with the first numbers and ends with `collect` or `leave`, or with this process.
    """

    def __init__(self, call: Callable[[list[int]], Sequence[T]]) -> None:
        """`call` gives one value a number; whatever it raises is raised by `collect`."""
        self._call = call
        self._coming: SimpleQueue[list[int] | None] = SimpleQueue()  # None: there will be no more
        self._values: dict[int, T] = {}
        self._error: BaseException | None = None
        self._left = False
        self._thread: threading.Thread | None = None

    def add(self, numbers: Iterable[int]) -> None:
        """Call the function with these too, as soon as it is free."""
        self._coming.put([*numbers])
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="early grading", daemon=True)
            self._thread.start()

    def collect(self) -> list[T]:
        """Every value in the order of the numbers, once all are there. Raises what the function raised."""
        self._coming.put(None)
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return [self._values[i] for i in sorted(self._values)]

    def leave(self) -> None:
        """Call the function no more; a call that is going on is left to itself."""
        self._left = True
        self._coming.put(None)

    def _run(self) -> None:
        last = False
        while not last and not self._left and self._error is None:
            came = [self._coming.get()]
            while not self._coming.empty():
                came.append(self._coming.get())
            last = None in came
            numbers = sorted(i for some in came if some is not None for i in some)
            try:
                self._values.update(zip(numbers, self._call(numbers) if numbers else [], strict=True))
            except BaseException as error:
                self._error = error
