"""A headless Chromium for tests and for looking at a page: its DevTools protocol over a pipe, no further package."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. Everything that it asks the network for, its errors and its console stand in `events`."""

    def __init__(self, read: int, write: int) -> None:
        self.read, self.write = os.fdopen(read, "rb", buffering=0), os.fdopen(write, "wb", buffering=0)
        self.numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.rest = b""
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.write.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = self.read.read(2**20)
            assert more, "the browser ended"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, path: Path, *, width: int, height: int, dark: bool) -> None:
        """Load a file and wait until it stands."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        place = path.resolve().as_uri()
        self.call("Page.navigate", url=place)
        # not a load event, which may be that of the empty page before
        while self.value("[location.href, document.readyState].join(' ')") != f"{place} complete":
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self, path: Path, *, top: int = 0, height: int | None = None) -> None:
        """A PNG of the page from `top` on, as high as asked for or as it is."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {
            "x": 0,
            "y": top,
            "width": size["width"],
            "height": height or size["height"] - top,
            "scale": 1,
        }
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own, ended with the block."""
    program = chromium()
    assert program is not None
    there, out = os.pipe()
    back, here = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    flags += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
    with tempfile.TemporaryDirectory(prefix="hpcgrpo-browser-", ignore_cleanup_errors=True) as profile:
        # The protocol wants file descriptors 3 and 4.
        line = f'exec "$0" "$@" 3<&{there} 4>&{here}'
        process = subprocess.Popen(
            ["bash", "-c", line, program, *flags, f"--user-data-dir={profile}"],
            pass_fds=(there, here),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        try:
            yield Browser(back, out)
        finally:
            process.terminate()
            process.wait(120)
