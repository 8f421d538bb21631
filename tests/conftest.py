"""What every test stands on: one thread per process, no network, nothing written outside the clone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"

# Before torch or a child process starts. Ranks that spin while waiting would starve each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "torchinductor"))
os.environ.setdefault("HF_HOME", str(CACHE / "huggingface"))
os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first, so that a plain mistake shows within seconds; slow ones get time on a busy machine."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data sets and oracles that may lie beside the clone."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}, which does not come with the project")
    return folder
