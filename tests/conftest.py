"""What every test stands on: one thread per process, no network, nothing written outside the clone."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cluster import Cluster

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

# With HPCGRPO_REQUIRE_CLUSTER=1 (.ci/run) a test that needs Slurm, vLLM or DeepSpeed and is skipped fails the session.
REQUIRED = os.environ.get("HPCGRPO_REQUIRE_CLUSTER", "0") not in ("", "0")
# Tests that take minutes each run where HPCGRPO_LONG_TESTS is set, as in .ci/run, or where they are asked for by name.
LONG = os.environ.get("HPCGRPO_LONG_TESTS", "0") not in ("", "0")
# What waits for Slurm and vLLM, and the files of it that share a cluster or an engine.
TOGETHER = {"cluster": "cluster", "cluster_faults": "cluster", "devcluster": "cluster"}
TOGETHER |= {"serve": "engine", "vllm_generator": "engine", "weight_sync": "engine"}
TOGETHER |= {"study_cluster": "more of the cluster", "two_policies_cluster": "more of the cluster"}
TOGETHER |= {"eval_cluster": "more of the cluster"}
WAITING = (*TOGETHER, "submit")
NEEDY = tuple(f"test_{name}.py" for name in (*WAITING, "deepspeed", "parity", "job"))
SAID = "measured"  # the key of a test report's lines for the end of the session


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests first, so that a plain mistake shows within seconds; slow ones get time on a busy machine.

    Of two processes (`make test`) both begin with what waits for Slurm and vLLM.
    """
    named = any("::" in argument for argument in config.args)
    for item in items:
        if item.get_closest_marker("long") and not (LONG or named):
            item.add_marker(pytest.mark.skip(reason="takes minutes; HPCGRPO_LONG_TESTS=1 runs it"))
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    several = hasattr(config, "workerinput")
    items.sort(
        key=lambda item: (
            several and item.path.stem.removeprefix("test_") not in WAITING,
            item.get_closest_marker("slow") is not None,
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files, or what shares a cluster, to a process; xdist's own groups do nothing with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = Path(nodeid.partition("::")[0]).stem.removeprefix("test_")
            return TOGETHER.get(name, name)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of data sets and oracles that may lie beside the clone."""
    folder = ROOT.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}, which does not come with the project")
    return folder


def _session_cluster(*, nodes: int, accounting: bool) -> Iterator[Cluster]:
    import cluster

    if reason := cluster.cannot_run(accounting=accounting):
        pytest.skip(reason)
    with cluster.running(nodes=nodes, accounting=accounting) as running:
        yield running


def _for_one_test(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    if left := cluster.settle():
        pytest.fail("the test left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def session_cluster() -> Iterator[Cluster]:
    """Six nodes without accounting, for module-scoped fixtures; tests take `cluster`."""
    yield from _session_cluster(nodes=6, accounting=False)


@pytest.fixture(scope="session")
def session_accounting_cluster() -> Iterator[Cluster]:
    yield from _session_cluster(nodes=3, accounting=True)


@pytest.fixture
def cluster(session_cluster: Cluster) -> Iterator[Cluster]:
    """A real Slurm of six nodes, all idle. What a test leaves running is ended and fails it."""
    yield from _for_one_test(session_cluster)


@pytest.fixture
def accounting_cluster(session_accounting_cluster: Cluster) -> Iterator[Cluster]:
    """The same with accounting (sacct, accounts, QOS) and three nodes."""
    yield from _for_one_test(session_accounting_cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows the ends of its runs' logs; what a test measured goes to the end of the session."""
    report: Any = yield
    if report.when == "call" and report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if name in ("cluster", "accounting_cluster"):
                report.sections.append(("logs of the runs", value.tails()))
    said = getattr(sys.modules.get("cluster"), "REPORT", [])
    report.user_properties.extend((SAID, line) for line in said)
    said.clear()
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, line in dict.fromkeys(getattr(report, "user_properties", ())):
                if key == SAID:
                    terminalreporter.write_line(line)
    for reason in _forbidden_skips(terminalreporter):
        terminalreporter.write_line(
            f"HPCGRPO_REQUIRE_CLUSTER is set, but a test was skipped: {reason}", red=True
        )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.exitstatus == 0 and _forbidden_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _forbidden_skips(reporter: Any) -> list[str]:
    reports = reporter.stats.get("skipped", []) if REQUIRED and reporter else []
    needy = [r for r in reports if any(name in r.nodeid for name in NEEDY)]
    found = [(r.nodeid, r.longrepr[2]) for r in needy if isinstance(r.longrepr, tuple)]
    return [f"{name}: {reason}" for name, reason in found if "HPCGRPO_LONG_TESTS" not in reason]
