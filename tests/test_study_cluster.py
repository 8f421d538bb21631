"""Studies on a real Slurm: one array, its elements requeued and resumed like any run's job, then the table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster import Cluster, write_cluster_config

from hpcgrpo import config
from hpcgrpo.journal import read_metrics
from hpcgrpo.launch import slurm, submit
from hpcgrpo.study import array, design
from hpcgrpo.study.cells import Cell

STUDY = """
name: arrayed
base: {base}
axes:
  arm: {{GRPO 4: {{}}, GRPO 8: {{algorithm.num_generations: 8}}}}
  seed: [0, 1]
compare: arm
metrics: {{reward: last, completions/sampled: sum}}
"""


def write(folder: Path, *, hold: Path | None = None, steps: int = 2, nodes: int = 1) -> Path:
    """A study of four small runs -> its YAML."""
    base = write_cluster_config(folder, nodes=nodes, steps=steps, save_steps=1, hold=hold)
    path = folder / "study.yaml"
    path.write_text(STUDY.format(base=base.name))
    return path


def cells(path: Path) -> list[Cell]:
    return list(design.load(path, output_dir=str(path.parent / "logs")).cells)


def lines(cell: Cell) -> list[int]:
    return [line["step"] for line in read_metrics(cell.run.folder)]


def job_ids(said: str) -> list[str]:
    return re.findall(r"job (\d+): \d+ runs", said)


def test_an_element_s_id_is_the_array_s_and_its_own() -> None:
    variables = {"SLURM_JOB_ID": "17", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "node1"}
    assert slurm.place(variables).attempt == "17.0"
    element = {
        **variables,
        "SLURM_ARRAY_JOB_ID": "12",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_RESTART_COUNT": "2",
    }
    assert slurm.place(element).attempt == "12_3.2"


def test_runs_that_ask_for_the_same_share_an_array(tmp_path: Path) -> None:
    """And the script names a folder for each element, in a place whose name the shell would read otherwise."""
    folder = tmp_path / "it's 100% $HOME"
    (folder / "model").mkdir(parents=True)  # nothing reads one here
    path = write(folder)
    text = path.read_text().replace("num_generations: 8}", "num_generations: 8, cluster.mem_gb: 2}")
    path.write_text(text)
    study = design.load(path, output_dir=str(folder / "logs"))
    found = array.arranged(study, study.cells, folder / "slurm")
    assert [[c.name for c in a.cells] for a in found] == [
        ["GRPO-4_seed0", "GRPO-4_seed1"],
        ["GRPO-8_seed0", "GRPO-8_seed1"],
    ]
    script = array.render(found[1], folder / "slurm", parallelism=1)
    assert "#SBATCH --array=0-1%1\n" in script and "#SBATCH --mem=2G\n" in script
    assert (
        "#SBATCH --job-name=arrayed\n" in script and "it'\"'\"'s 100%% $HOME/slurm/array-%A_%a.out'" in script
    )
    assert script.count("logs/arrayed/GRPO-8_seed") == 2


@pytest.mark.slow
def test_a_study_runs_as_an_array_to_its_table(cluster: Cluster, tmp_path: Path) -> None:
    path = write(tmp_path, nodes=2)
    common = ("study", str(path), "--executor", "slurm", "--output-dir", str(tmp_path / "logs"))
    done = cluster.hpcgrpo(
        *common, "--wait", "--json", "--array-parallelism", "3", "--only", "seed=0", timeout_seconds=400
    )
    (job,) = job_ids(done.stderr)
    cluster.track(job)
    cluster.runs.extend(cell.run.folder for cell in cells(path))
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(done.stdout)
    assert [m["cell"] for m in table["missing"]] == ["GRPO-4_seed1", "GRPO-8_seed1"]
    assert table["metrics"]["completions/sampled"]["GRPO 8"]["mean"] == 32
    for cell, index in ((cells(path)[0], 0), (cells(path)[2], 1)):
        assert (cell.run.folder / "slurm" / f"{job}_{index}.0" / "node-1.log").exists()
        assert lines(cell) == [1, 2]
    again = cluster.hpcgrpo(*common, "--only", "seed=0")
    assert again.returncode == 0 and "2 runs, 2 finished" in again.stderr and not job_ids(again.stderr)


@pytest.mark.long
@pytest.mark.slow
def test_an_element_is_requeued_and_a_live_one_is_not_queued_twice(cluster: Cluster, tmp_path: Path) -> None:
    """One element is requeued by hand, one is cancelled; the same command takes up what is not finished.

    Until it has looked at the queue, no run gets further than its first step.
    """
    hold = tmp_path / "hold"
    hold.touch()
    path = write(tmp_path, steps=4, hold=hold)
    common = ("study", str(path), "--executor", "slurm", "--output-dir", str(tmp_path / "logs"))
    first = cluster.hpcgrpo(*common, "--array-parallelism", "2")
    assert first.returncode == 0, first.stderr
    (job,) = job_ids(first.stderr)
    cluster.track(job)
    runs = cells(path)
    cluster.runs.extend(cell.run.folder for cell in runs)
    assert submit.last(runs[3].run.folder).job_id == f"{job}_3"  # type: ignore[union-attr]
    cluster.until(lambda: len(lines(runs[0])) >= 1, "a step of the first run", timeout_seconds=200)
    cluster.login("scontrol", "requeue", f"{job}_0")
    cluster.login("scancel", f"{job}_3")
    second = cluster.hpcgrpo(*common)
    hold.unlink()
    assert second.returncode == 0, second.stderr
    assert "3 in the queue" in second.stderr and "1 runs" in second.stderr, second.stderr
    (other,) = job_ids(second.stderr)
    cluster.track(other)
    third = cluster.hpcgrpo(*common, "--wait", "--json", timeout_seconds=400)
    assert third.returncode == 0, third.stdout + third.stderr
    assert not json.loads(third.stdout)["missing"]
    assert [lines(cell) for cell in runs] == [[1, 2, 3, 4]] * 4
    assert (runs[0].run.folder / "slurm" / f"{job}_0.1").is_dir()
    said = json.loads((runs[0].run.folder / "slurm" / "ended.json").read_text())
    assert (said["job"], said["attempt"], said["code"]) == (f"{job}_0", f"{job}_0.1", 0)


@pytest.mark.slow
def test_what_the_queue_refuses_is_told_before_any_run_is_queued(cluster: Cluster, tmp_path: Path) -> None:
    path = write(tmp_path)
    text = path.read_text().replace(
        "num_generations: 8}", "num_generations: 8, cluster.slurm_partition: mian}"
    )
    path.write_text(text)
    done = cluster.hpcgrpo("study", str(path), "--executor", "slurm", "--output-dir", str(tmp_path / "logs"))
    assert done.returncode == 2
    assert "cluster.slurm_partition mian: no such partition (did you mean main?)" in done.stderr
    assert cluster.login("squeue", "-h").stdout == ""
    assert config.load(cells(path)[0].run.folder / "config.yaml") == cells(path)[0].run
