"""Evaluations as jobs, without a cluster: what they ask of Slurm, why something is missing, and rolling evaluations."""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from evaluation import following, jobs, reasons, rolling, scripts
from evaluation.config import EvaluationConfig, load
from evaluation.task import Task
from hpcgrpo.config import ConfigError
from hpcgrpo.journal import FolderInUse, claim
from hpcgrpo.launch import queue, snapshot, submit
from hpcgrpo.sections import ClusterConfig

GPUS = ClusterConfig(
    gpus_per_node=8,
    timeout_min=240,
    slurm_partition="h100",
    slurm_account="research",
    cpus_per_task=32,
    mem_gb=500,
    slurm_exclusive=True,
    slurm_setup=("module load cuda",),
    slurm_srun_args=("--container-image=/images/a b.sqsh",),
    slurm_additional_parameters={"gpu_bind": "closest", "mail_type": "END"},
    max_requeues=3,
)


def tasks(folder: Path, *names: str, source: str = "/runs/r") -> list[Task]:
    config = EvaluationConfig(benchmarks=names)
    return [Task(source, config, name, str(folder)) for name in names]


# ---- what is asked of Slurm


def test_the_array_and_its_merge_ask_for_what_they_need(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100% $HOME"
    (array,), merge = scripts.arranged(
        tasks(folder, "gsm8k", "math500"), cluster=GPUS, after="12_3", name="ev", folder=folder
    )
    lines = scripts.render(array).splitlines()
    asked = {line for line in lines if line.startswith("#SBATCH")}
    quoted = str(tmp_path) + "/it'\"'\"'s 100%% $HOME/jobs/slurm"
    assert asked == {
        "#SBATCH --job-name=ev",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=32",
        "#SBATCH --mem=500G",
        "#SBATCH --exclusive",
        "#SBATCH --time=240",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=h100",
        "#SBATCH --account=research",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=USR2@120",
        f"#SBATCH --chdir={Path.cwd()}",
        "#SBATCH --gpu-bind=closest",
        "#SBATCH --mail-type=END",
        "#SBATCH --dependency=afterok:12_3",
        "#SBATCH --kill-on-invalid-dep=yes",
        "#SBATCH --array=0-1",
        f"#SBATCH --output='{quoted}/array-%A_%a.out'",
    }
    asked = {
        line.partition("=")[0] for line in scripts.render(merge).splitlines() if line.startswith("#SBATCH")
    }
    assert not asked & {
        f"#SBATCH --{name}" for name in ("gpus-per-node", "exclusive", "gpu-bind", "dependency")
    }
    merged = scripts.render(merge)
    assert "--cpus-per-task=1\n" in merged and "--mem=8G\n" in merged and "--time=30\n" in merged
    assert "--partition=h100\n" in merged and "'--container-image=/images/a b.sqsh'" in merged
    for text in (scripts.render(array), merged):
        assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_without_a_training_there_is_no_dependency_and_a_user_s_own_is_kept(tmp_path: Path) -> None:
    made = tasks(tmp_path, "a")
    (array,), _ = scripts.arranged(made, cluster=GPUS, after=None, name="ev", folder=tmp_path)
    assert "dependency" not in array.job.options
    own = GPUS.model_copy(update={"slurm_dependency": "afterany:7"})
    (array,), merge = scripts.arranged(made, cluster=own, after="12", name="ev", folder=tmp_path)
    assert array.job.options["dependency"] == "afterok:12,afterany:7"
    assert "dependency" not in merge.job.options


def test_more_tasks_than_an_array_takes_are_several_arrays(tmp_path: Path) -> None:
    config = EvaluationConfig(benchmarks=("a",))
    n = scripts.LARGEST + 2
    many = [Task("m", config, "a", str(tmp_path), shard=(i, n)) for i in range(n)]
    arrays, _ = scripts.arranged(many, cluster=GPUS, after=None, name="ev", folder=tmp_path)
    assert [a.job.options["array"] for a in arrays] == ["0-999", "0-1"]
    assert [name for a in arrays for name in a.names] == [task.name for task in many]


@pytest.mark.parametrize(
    ("names", "change", "after", "words"),
    [
        (("a",), {"nodes": 2}, None, "cluster.nodes 2.*set cluster.nodes=1"),
        (("a", "a"), {}, None, "benchmarks: a is there twice"),
        (("merge",), {}, None, "benchmarks: merge .* a name of our own"),
        (("a",), {}, "local77", "job local77 is none of Slurm's"),
    ],
)
def test_what_cannot_be_queued_is_refused(
    tmp_path: Path, names: Sequence[str], change: dict[str, int], after: str | None, words: str
) -> None:
    cluster = GPUS.model_copy(update=change)
    with pytest.raises(ConfigError, match=words):
        scripts.arranged(tasks(tmp_path, *names), cluster=cluster, after=after, name="ev", folder=tmp_path)


def test_the_copy_of_the_code_holds_this_package_too(tmp_path: Path) -> None:
    code = snapshot.take({}, tmp_path, beside=("evaluation",))
    assert (code / "evaluation" / "jobs.py").read_text() == Path(jobs.__file__).read_text()
    assert (code / "hpcgrpo" / "cli.py").exists()
    environment = {**os.environ, "PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", "import evaluation; print(evaluation.__file__)"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str(code / "evaluation" / "__init__.py")


def test_a_command_of_slurm_s_outlives_the_signals_that_a_job_s_processes_get() -> None:
    """An sbatch that is ended half-way may have queued its job already."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    try:
        kills = "kill -USR2 $$ $PPID; kill -TERM $$; sleep 0.1; echo queued"
        assert queue.ask("bash", "-c", kills).out == "queued\n"
        assert seen == [signal.SIGUSR2] and not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_shell_s_variables_do_not_decide_what_the_job_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "SBATCH_ARRAY_INX",
        "SBATCH_WAIT",
        "SBATCH_NO_REQUEUE",
        "SBATCH_KILL_INVALID_DEP",
        "SBATCH_QOS",
    ):
        monkeypatch.setenv(name, "x")
    assert {k for k in queue.environment({}) if k.startswith("SBATCH_")} == {
        "SBATCH_KILL_INVALID_DEP",
        "SBATCH_QOS",
    }
    assert not [
        k for k in queue.environment({"kill-on-invalid-dep": "yes", "qos": "q"}) if k.startswith("SBATCH_")
    ]


def test_a_new_sharing_out_replaces_the_tasks_of_its_benchmark_alone(tmp_path: Path) -> None:
    config = EvaluationConfig(benchmarks=("a", "b"))
    place = tmp_path / "jobs"
    shards = [Task("m", config, "a", str(tmp_path), shard=(i, 2)) for i in range(2)]
    jobs._write_tasks([*shards, Task("m", config, "b", str(tmp_path))], place)
    for name in ("a-0-of-2", "b", "a"):
        (place / f"{name}.reason").write_text("old")
        (place / f"{name}.log").write_text("old")
    jobs._write_tasks(tasks(tmp_path, "a"), place)
    assert sorted(p.name for p in place.iterdir() if p.is_file()) == [
        "a-0-of-2.log.before", "a.json", "a.log.before", "b.json", "b.log", "b.reason"
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["- a\n", "4\n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{path}: .*(holds no mapping of keys|[Ii]nvalid loaded object)"):
        load(path, ["benchmarks=chain"])


# ---- why something is missing


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))


def end_training(run: Path, **values: object) -> None:
    said = {"job": "12", "attempt": "12.1", "code": 1, "reason": "rank 3: out of memory", "requeued": False}
    for folder, change in (("12.0", {"requeued": True, "reason": "time limit"}), ("12.1", values)):
        (run / "slurm" / folder).mkdir(parents=True)
        (run / "slurm" / folder / "ended.json").write_text(json.dumps({**said, **change}))


def record(folder: Path, run: Path | None, *names: str) -> jobs.Submitted:
    elements = {name: f"20_{i}" for i, name in enumerate(names)}
    done = jobs.Submitted(folder, elements, "21", "12" if run else None, str(run) if run else None)
    reasons.write_record(done)
    return done


def test_why_a_training_ended_is_read_from_its_folder_where_slurm_is_silent(
    no_slurm: None, tmp_path: Path
) -> None:
    end_training(tmp_path)
    assert jobs.why("12", tmp_path) == "the training job 12 ended FAILED (exit code 1): rank 3: out of memory"
    assert jobs.why("13", tmp_path) is None and jobs.why("12", None) is None


def test_a_training_that_ended_well_or_was_queued_again_is_no_reason(no_slurm: None, tmp_path: Path) -> None:
    end_training(tmp_path, code=0, reason="finished")
    assert jobs.why("12", tmp_path) is None
    end_training(tmp_path / "again", requeued=True)
    assert jobs.why("12", tmp_path / "again") is None


def test_each_task_that_did_not_end_well_has_its_reason(no_slurm: None, tmp_path: Path) -> None:
    folder, run = tmp_path / "eval", tmp_path / "run"
    end_training(run)
    jobs_of = record(folder, run, "fine", "crashed", "own", "stopped", "never")
    place = folder / "jobs"
    for name, code in (("fine", 0), ("crashed", 1), ("own", 2), ("stopped", 75)):
        (place / f"{name}.log").write_text("all is well\n")
        (place / "slurm" / f"{name}.code").write_text(f"{code}\n")
    (place / "crashed.log").write_text("loading\nRuntimeError: CUDA error: out of paint\n")
    (place / "own.reason").write_text("the model has no chat template\n")
    reasons = jobs.explain(folder)
    assert reasons == {
        "crashed": "failed with exit code 1: RuntimeError: CUDA error: out of paint",
        "own": "the model has no chat template",
        "stopped": "stopped before its end; the same command goes on from there",
        "never": "cancelled: the training job 12 ended FAILED (exit code 1): rank 3: out of memory",
    }
    assert {p.stem: p.read_text().strip() for p in place.glob("*.reason")} == reasons
    assert jobs.explain(folder) == reasons
    assert jobs.submitted(folder) == jobs_of


def test_an_evaluation_without_a_checkpoint_and_a_training_is_refused(no_slurm: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no complete checkpoint .* train it first \(hpcgrpo submit\)"):
        jobs.training_job(tmp_path)
    write_checkpoint(tmp_path, 3)
    assert jobs.training_job(tmp_path) is None
    assert jobs.explain(tmp_path) == {} and jobs.submitted(tmp_path) is None
    with pytest.raises(ConfigError, match="no evaluation was queued here"):
        following.follow(tmp_path)


# ---- rolling


def write_checkpoint(run: Path, step: int, *, keep: int = 100) -> Path:
    """As a training leaves one, of which the oldest go."""
    folder = run / "checkpoints" / f"checkpoint-{step}"
    for name in (
        "config.json",
        "model.safetensors",
        "peer/model.safetensors",
        "state/.metadata",
        "trainer_state.json",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{name} {step}")
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    (folder / "COMPLETE").write_text(json.dumps(sizes))
    for old in range(1, step - keep + 1):
        shutil.rmtree(run / "checkpoints" / f"checkpoint-{old}", ignore_errors=True)
    return folder


class Local:
    """Evaluates in this process: reads the model it is given, and lets the training go on meanwhile."""

    def __init__(self, run: Path, meanwhile: Callable[[int], None] = lambda step: None) -> None:
        self.run, self.meanwhile, self.steps, self.codes = run, meanwhile, list[int](), dict[int, int]()

    def tasks(self, model: Path, step: int) -> list[Task]:
        return tasks(rolling.folder_of(self.run, step), "a", source=str(model))

    def submit(self, made: Sequence[Task]) -> int:
        text = (Path(made[0].source) / "model.safetensors").read_text()
        step = int(text.split()[-1])
        self.steps.append(step)
        self.meanwhile(step)
        code = self.codes.get(step, 0)
        if code == 0:
            assert rolling.note(Path(made[0].folder), {"a": step / 10}, {})
        return code

    def watch(self, alive: Callable[[], bool], every: int = 1, said: list[str] | None = None) -> int:
        return rolling.watch(
            self.run, tasks_for=self.tasks, submit=self.submit, alive=alive, poll_seconds=0.02, every=every,
            tell=(said if said is not None else []).append,
        )  # fmt: skip


def wait_until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_kept_model_outlives_its_checkpoint_and_costs_no_space(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 1)
    target = tmp_path / "eval" / "checkpoint-1" / "model"
    inode = (checkpoint / "model.safetensors").stat().st_ino
    rolling.keep(checkpoint, target)
    kept = {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()}
    assert kept == {"config.json", "model.safetensors", "peer/model.safetensors"}
    assert (target / "model.safetensors").stat().st_ino == inode
    write_checkpoint(tmp_path, 2, keep=1)
    assert not checkpoint.exists() and (target / "model.safetensors").read_text() == "model.safetensors 1"


def test_a_checkpoint_that_goes_away_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, 1)
    (checkpoint / "peer" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        rolling.keep(checkpoint, tmp_path / "eval" / "checkpoint-1" / "model")
    assert list((tmp_path / "eval" / "checkpoint-1").iterdir()) == []


def test_every_checkpoint_is_evaluated_though_the_training_removes_them(tmp_path: Path) -> None:
    """The first evaluation lasts until three further checkpoints have come and gone."""

    def meanwhile(step: int) -> None:
        if step == 1:
            for later in (2, 3, 4):
                write_checkpoint(tmp_path, later, keep=1)
                wait_until((rolling.folder_of(tmp_path, later) / "model").exists)

    write_checkpoint(tmp_path, 1, keep=1)
    local = Local(tmp_path, meanwhile)
    assert local.watch(lambda: not local.steps) == 0
    assert local.steps == [1, 2, 3, 4]
    assert rolling.curve(tmp_path) == {step: {"a": step / 10} for step in (1, 2, 3, 4)}
    assert not list((tmp_path / "eval").glob("checkpoint-*/model"))
    assert [line.split() for line in rolling.table(tmp_path).splitlines()] == [
        ["step", "a"], ["1", "10.0"], ["2", "20.0"], ["3", "30.0"], ["4", "40.0"]
    ]  # fmt: skip
    again = Local(tmp_path)
    assert again.watch(lambda: False) == 0 and again.steps == []


def test_every_second_checkpoint_and_the_last(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40, 45):
        write_checkpoint(tmp_path, step)
    local = Local(tmp_path)
    assert local.watch(lambda: False, every=2) == 0
    assert local.steps == [20, 40, 45]
    assert "passed" in rolling.table(tmp_path)


def test_half_written_checkpoints_wait_until_they_are_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, 1)
    (folder / "model.safetensors").write_text("half")
    answers = iter([True, True, False])

    def alive() -> bool:
        on = next(answers)
        if not on:
            (folder / "model.safetensors").write_text("model.safetensors 1")
        return on

    local = Local(tmp_path)
    assert local.watch(alive) == 0 and local.steps == [1]


def test_what_failed_is_told_and_its_model_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    write_checkpoint(tmp_path, 2)
    local, said = Local(tmp_path), list[str]()
    local.codes[1] = 2
    assert local.watch(lambda: False, said=said) == 1 and local.steps == [1, 2]
    assert said == ["checkpoint 1 incomplete: exit code 2"]
    assert (rolling.folder_of(tmp_path, 1) / "model").is_dir()
    assert not (rolling.folder_of(tmp_path, 2) / "model").exists()


def test_a_training_without_checkpoints_is_told(tmp_path: Path) -> None:
    said: list[str] = []
    assert Local(tmp_path).watch(lambda: False, said=said) == 1
    assert "left no complete checkpoint" in said[0]


def test_a_stop_leaves_what_is_kept_for_the_next_start(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    local = Local(tmp_path)
    local.codes[1] = 75
    assert local.watch(lambda: True) == 75
    local.codes.clear()
    looks = itertools.count(1)

    def stopped_at_the_second_look() -> bool:
        if next(looks) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return True

    assert local.watch(stopped_at_the_second_look) == 75 and local.steps == [1, 1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_full_queues_are_asked_again_and_other_refusals_are_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    errors = [
        ConfigError("Slurm refuses the job (Job violates accounting/QOS policy (job submit limit))")
    ] * 2
    local, said = Local(tmp_path), list[str]()

    def submit_(made: Sequence[Task]) -> Sequence[str]:
        if errors:
            raise errors.pop()
        return ["5", "6"]

    common = {"tasks_for": local.tasks, "submit": submit_, "poll_seconds": 0.01, "tell": said.append}
    assert rolling.watch(tmp_path, alive=lambda: False, **common) == 0  # type: ignore[arg-type]
    assert [s.rpartition(";")[2] for s in said] == [" asking again", "checkpoint 1: evaluated by job 5, 6"]
    write_checkpoint(tmp_path, 2)
    errors.append(ConfigError("cluster.slurm_partition mian: no such partition"))
    with pytest.raises(ConfigError, match="mian"):
        rolling.watch(tmp_path, alive=lambda: False, **common)  # type: ignore[arg-type]
    entries = json.loads((tmp_path / "eval" / "rolling.json").read_text())["checkpoints"]
    assert {step: e["state"] for step, e in entries.items()} == {"1": "submitted", "2": "kept"}


def test_what_was_queued_by_a_start_that_died_is_not_queued_again(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 1)
    record(rolling.folder_of(tmp_path, 1), None, "a")
    local = Local(tmp_path)
    assert local.watch(lambda: False) == 0 and local.steps == []


def test_one_watches_at_a_time(tmp_path: Path) -> None:
    with claim(tmp_path / "eval"), pytest.raises(FolderInUse):
        Local(tmp_path).watch(lambda: True)


def test_a_merge_that_lacks_a_benchmark_keeps_the_model(tmp_path: Path) -> None:
    folder = rolling.folder_of(tmp_path, 1)
    assert not rolling.note(folder, {"a": 0.5}, {})
    rolling.keep(write_checkpoint(tmp_path, 1), folder / "model")
    rolling._update(tmp_path, 1, state="submitted")
    assert rolling.note(folder, {"a": 0.5}, {"b": "cancelled"})
    assert (folder / "model").is_dir() and rolling.curve(tmp_path) == {1: {"a": 0.5}}
    rolling._update(tmp_path, 1, state="submitted", jobs=["5"])  # by a watch that was slower
    assert json.loads((tmp_path / "eval" / "rolling.json").read_text())["checkpoints"]["1"] == {
        "state": "incomplete", "scores": {"a": 0.5}, "missing": {"b": "cancelled"}, "why": "", "jobs": ["5"]
    }  # fmt: skip
    assert rolling.note(folder, {"a": 0.5, "b": 0.25}, {}) and not (folder / "model").exists()
    assert not rolling.note(tmp_path / "elsewhere" / "checkpoint-1", {"a": 0.5}, {})


def test_a_damaged_record_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "rolling.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        Local(tmp_path).watch(lambda: False)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system than `tmp_path`, so that hard links are refused."""
    place = Path(f"/dev/shm/hpcgrpo-rolling-{os.getpid()}")
    if not place.parent.is_dir() or place.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    place.mkdir()
    yield place
    shutil.rmtree(place)


def test_where_links_are_refused_files_are_copied_and_a_full_disk_skips(
    tmp_path: Path, elsewhere: Path
) -> None:
    (tmp_path / "eval").symlink_to(elsewhere)
    write_checkpoint(tmp_path, 1)
    local, said = Local(tmp_path), list[str]()
    assert local.watch(lambda: False) == 0 and local.steps == [1]
    folder = write_checkpoint(tmp_path, 2)
    (folder / "model.safetensors").write_text("w" * 2**20)
    sizes = json.loads((folder / "COMPLETE").read_text())
    (folder / "COMPLETE").write_text(json.dumps({**sizes, "model.safetensors": 2**20}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, limits[1]))
    try:
        assert local.watch(lambda: False, said=said) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        local.steps == [1] and "checkpoint 2 is not evaluated" in said[0] and "cannot be written" in said[0]
    )
    assert list(rolling.folder_of(tmp_path, 2).iterdir()) == []
    assert "skipped" in rolling.table(tmp_path)


def test_a_training_of_this_machine_is_seen(tmp_path: Path) -> None:
    assert not rolling.training_lives(tmp_path)
    hold = (
        "import sys; from pathlib import Path; from hpcgrpo.journal import claim; lock = claim(Path(sys.argv[1]));"
        " print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert rolling.training_lives(tmp_path)
        process.communicate()
    assert not rolling.training_lives(tmp_path)
    assert submit.last(tmp_path) is None
