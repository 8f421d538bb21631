"""Data sets of the Hugging Face hub, or of its cache where the hub cannot be reached."""

from __future__ import annotations

import contextlib
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

REACH_SECONDS = 5.0  # for the hub to answer at all; without this, datasets asks six times over half a minute


class NotLoaded(ValueError):
    """A data set that neither the hub nor its cache gave."""

    def __init__(self, name: str, config_name: str | None, split: str, why: str) -> None:
        self.why = f"data set {name!r} ({config_name or 'default'}, {split}) cannot be loaded: {why}"
        super().__init__(
            f"{self.why}. On a machine without internet, load it once where there is one (the cache is in HF_HOME), or"
            " set path to a JSONL file or a folder written by save_to_disk"
        )


def load(datasets: Any, name: str, config_name: str | None, split: str) -> Any:
    """The data set by `datasets`, which looks into the hub's cache alone where the hub does not answer.

    Raises NotLoaded at once where it is offline and not in the cache.
    """
    from huggingface_hub import constants

    offline = constants.HF_HUB_OFFLINE or datasets.config.HF_HUB_OFFLINE
    unreachable = "" if offline else _unreachable(constants.ENDPOINT)
    try:
        with _offline(datasets, constants) if unreachable else contextlib.nullcontext():
            return datasets.load_dataset(name, config_name, split=split)
    except (OSError, ValueError) as error:  # what datasets raises for no network, no such name, no such split
        silent = unreachable or ("HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set" if offline else "")
        known = f"{silent}, and it is not in the hub's cache" if silent else ""
        why = known if known and isinstance(error, ConnectionError) else " ".join(str(error).split())
        raise NotLoaded(name, config_name, split, why) from None


def _unreachable(endpoint: str) -> str:
    """Why the hub does not answer, or nothing; proxies are those of the environment."""
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        return ""  # it answered
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return ""  # for datasets to settle, which may know other certificates
        return f"{endpoint} cannot be reached ({reason})"
    return ""


@contextlib.contextmanager
def _offline(datasets: Any, constants: Any) -> Iterator[None]:
    """As if HF_HUB_OFFLINE had been set, so that nothing is asked again and again."""
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
