"""What a run asks of Slurm, as a value and as a script; the copy of the code it runs; the words about the queue."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgrpo import config
from hpcgrpo.config import ConfigError
from hpcgrpo.launch import partitions, queue, sbatch, snapshot
from hpcgrpo.launch.job import OWN_OPTIONS, Job, imports, job_for
from hpcgrpo.sections import ClusterConfig, RunConfig

ROOT = Path(__file__).parents[1]
PYTHON = ".venv/bin/python"
SHIPPED = [path for path in sorted((ROOT / "configs").glob("*.yaml")) if config.load(path).cluster.nodes > 1]

RUN = """
name: run
model_name_or_path: /models/m
algorithm: {name: grpo, num_generations: 4}
rewards: {accuracy: 1.0}
data: {preset: gsm8k}
train: {train_batch_size: 8, max_steps: 6}
"""
EVERYTHING = """
cluster:
  nodes: 3
  gpus_per_node: 8
  timeout_min: 1440
  slurm_partition: long,short
  slurm_account: research
  slurm_qos: high
  slurm_constraint: "h100&ib"
  slurm_gres: gpu:h100:8
  slurm_exclude: node[7-8]
  slurm_nodelist: node1
  slurm_dependency: afterok:12
  slurm_comment: it's mine
  cpus_per_task: 96
  mem_gb: 1.5
  slurm_exclusive: true
  slurm_setup: [module load cuda, 'export NAME="a b"']
  slurm_srun_args: ["--container-image=/images/a b.sqsh"]
  slurm_additional_parameters: {mail_type: "END,FAIL", --nice: 100, contiguous: true}
"""


def loaded(extra: str = "", *overrides: str) -> RunConfig:
    return config.load("run.yaml", overrides, text=RUN + extra)


def everything() -> Job:
    return job_for(loaded(EVERYTHING), directory=Path("/home/me/my work"), python="/sw/venv/bin/python")


def test_a_job_with_every_key_is_the_script_that_was_read_by_hand() -> None:
    assert sbatch.render(everything()) == (ROOT / "tests" / "golden" / "everything.sbatch").read_text()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_shipped_scripts_are_what_render_prints(path: Path) -> None:
    written = ROOT / "slurm" / f"{path.stem}.sbatch"
    again = f"hpcgrpo render {path.relative_to(ROOT)} > {written.relative_to(ROOT)}"
    assert written.exists(), f"run: {again}"
    assert written.read_text() == sbatch.render(job_for(config.load(path), python=PYTHON)), f"run: {again}"


def test_a_script_carries_the_run() -> None:
    """What stands between the marks loads to the same run: nothing that was set is lost."""
    run = loaded(EVERYTHING, "data.system_prompt='two\nlines'", "train.learning_rate=3.0e-5")
    script = sbatch.render(job_for(run))
    text = script.partition(f"<<'{sbatch.CONFIG_END}' || exit\n")[2].partition(f"\n{sbatch.CONFIG_END}\n")[0]
    assert config.load("script", text=text) == run
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_render_prints_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    command = [sys.executable, "-m", "hpcgrpo.cli", "render", "run.yaml", "cluster.slurm_partition=long"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "\n#SBATCH --partition=long\n" in done.stdout
    assert f"{Path(sys.executable).parent}/python -u -m hpcgrpo.cli node logs/run\n" in done.stdout


@pytest.mark.skipif(shutil.which("srun") is None, reason="submitit's Slurm executor needs srun on the PATH")
@pytest.mark.parametrize("extra", ["", EVERYTHING])
def test_submitit_asks_for_the_same(extra: str, tmp_path: Path) -> None:
    """Each option once, none of submitit's own, and the same srun line but for what it starts."""
    from hpcgrpo.launch import submit

    job = job_for(loaded(extra), directory=tmp_path)
    executor = submit.submitit.SlurmExecutor(folder=tmp_path / "%j", python=submit.started(job))
    executor.update_parameters(**submit.parameters(job))
    text = executor._make_submission_file_text(executor._submitit_command_str, "")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    asked = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    log = f"#SBATCH --output={sbatch.quote(str(tmp_path))}/logs/run/slurm/job-%j.log"
    assert sorted(asked) == sorted([*sbatch.directives(job), log])
    assert [line.partition(" -u -m ")[0] for line in text.splitlines() if line.startswith("srun ")] == [
        line.partition(" -u -m ")[0] for line in sbatch.render(job).splitlines() if line.startswith("srun ")
    ]
    assert all(line in text.splitlines() for line in job.setup)


# ---- what follows from the keys


def options(**keys: object) -> dict[str, str | bool]:
    run = loaded().model_copy(update={"cluster": ClusterConfig(**keys)})
    return dict(job_for(run).options)


def test_a_plain_run_asks_for_little() -> None:
    kept = {"requeue": True, "open-mode": "append", "signal": "USR2@120"}
    assert options() == {"job-name": "run", "nodes": "1", "ntasks-per-node": "1", **kept}


@pytest.mark.parametrize(
    ("keys", "asked"),
    [
        ({"mem_gb": 64}, {"mem": "64G"}),
        ({"mem_gb": 0.25}, {"mem": "256M"}),
        ({"slurm_exclusive": True}, {"exclusive": True, "mem": "0"}),
        ({"slurm_exclusive": True, "mem_gb": 2}, {"exclusive": True, "mem": "2G"}),
        ({"gpus_per_node": 8}, {"gpus-per-node": "8"}),
        ({"gpus_per_node": 8, "slurm_gres": "gpu:a100:8"}, {"gres": "gpu:a100:8"}),
        ({"timeout_min": 5}, {"time": "5", "signal": "USR2@30"}),
        ({"timeout_min": 1440}, {"time": "1440"}),  # USR2@120
        ({"slurm_additional_parameters": {"licenses": "a:1"}}, {"licenses": "a:1"}),
    ],
)
def test_keys_become_options(keys: dict[str, object], asked: dict[str, object]) -> None:
    got = options(**keys)
    assert {k: v for k, v in got.items() if k not in options() or v != options()[k]} == asked


def test_a_node_s_task_gets_its_processors_in_the_step_too() -> None:
    run = loaded("cluster: {cpus_per_task: 12, slurm_srun_args: [--cpu-bind=cores]}")
    args = job_for(run).srun_args
    assert args == ("--kill-on-bad-exit=1", "--cpu-bind=none", "--cpus-per-task=12", "--cpu-bind=cores")


@pytest.mark.parametrize("option", OWN_OPTIONS)
def test_no_option_is_given_twice(option: str) -> None:
    for written in (option, option.replace("-", "_"), f"--{option}"):
        with pytest.raises(ConfigError, match=r"cluster\.slurm_additional_parameters") as error:
            options(slurm_additional_parameters={written: "x"})
        assert (OWN_OPTIONS[option] or "leave it out") in str(error.value)


@pytest.mark.parametrize("value", [False, None, [1], {"a": 1}])
def test_values_that_sbatch_cannot_take(value: object) -> None:
    with pytest.raises(ConfigError, match="true for a flag"):
        options(slurm_additional_parameters={"nice": value})


@pytest.mark.parametrize("folder", ["a%jb", "%t", "%A/x", "x%a", "back\\slash", "new\nline"])
def test_folders_that_slurm_would_read_differently(folder: str) -> None:
    with pytest.raises(ConfigError, match="output_dir"):
        job_for(loaded().model_copy(update={"output_dir": folder}))


def test_a_percent_sign_stands_for_itself() -> None:
    run = loaded().model_copy(update={"output_dir": "/data/100%x"})
    assert sbatch.pattern(job_for(run).log) == "/data/100%%x/run/slurm/job-%j.log"


def test_paths_are_absolute_with_a_directory_and_as_given_without() -> None:
    here, there = job_for(loaded()), job_for(loaded(), directory=Path("/w"))
    assert (here.folder, here.command[-1], "chdir" in here.options) == ("logs/run", "logs/run", False)
    assert (there.folder, there.command[-1], there.options["chdir"]) == ("/w/logs/run", "/w/logs/run", "/w")
    elsewhere = loaded().model_copy(update={"output_dir": "/data"})
    assert job_for(elsewhere, directory=Path("/w")).folder == "/data/run"


# ---- the copy of the code


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path with a module, a package, a folder without __init__, and a file named by its path."""
    folder = tmp_path / "user"
    for name in (
        "alone.py",
        "pack/__init__.py",
        "pack/inner/rule.py",
        "pack/table.json",
        "bare/rule.py",
        "file.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"NAME = '{name}'\n")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def rewards(folder: Path) -> dict[str, float]:
    return dict.fromkeys(("accuracy", "alone:f", "pack.inner:f", "bare.rule:f", f"{folder}/file.py:f"), 1.0)


def test_a_snapshot_holds_the_package_and_the_user_s_rewards(user_code: Path, tmp_path: Path) -> None:
    code = snapshot.take(rewards(user_code), tmp_path / "slurm")
    held = {str(path.relative_to(code)) for path in code.rglob("*") if path.is_file()}
    own = {f"hpcgrpo/{p.relative_to(ROOT / 'hpcgrpo')}" for p in (ROOT / "hpcgrpo").rglob("*") if p.is_file()}
    users = {"alone.py", "pack/__init__.py", "pack/inner/rule.py", "pack/table.json", "bare/rule.py"}
    assert held == {p for p in own if "__pycache__" not in p} | users | {f"files{user_code}/file.py"}


def test_edits_make_another_snapshot_and_leave_the_first_alone(user_code: Path, tmp_path: Path) -> None:
    root = tmp_path / "slurm"
    first = snapshot.take(rewards(user_code), root)
    assert snapshot.take(rewards(user_code), root) == first
    (user_code / "alone.py").write_text("NAME = 'edited'\n")
    second = snapshot.take(rewards(user_code), root)
    assert second != first
    assert (first / "alone.py").read_text() == "NAME = 'alone.py'\n"
    assert (second / "alone.py").read_text() == "NAME = 'edited'\n"
    snapshot.prune(root, keep=second)
    assert list(root.iterdir()) == [second]


def test_installed_modules_are_not_copied(tmp_path: Path) -> None:
    plain = snapshot.take({"accuracy": 1.0}, tmp_path)
    assert snapshot.take({"accuracy": 1.0, "json:loads": 1.0, "pytest:fail": 1.0}, tmp_path) == plain


@pytest.mark.parametrize("name", ["plain", "it's $HOME `x` 100%x"])
def test_a_job_imports_the_snapshot_and_not_the_folder_it_runs_in(tmp_path: Path, name: str) -> None:
    """In the shell that sbatch starts, in a folder that holds edited code of the same name."""
    code, edited, before = tmp_path / name / "code", tmp_path / name / "edited", tmp_path / "before"
    for folder, modules in ((code, "a"), (edited, "ac"), (before, "abc")):
        folder.mkdir(parents=True)
        for module in modules:
            (folder / f"{module}.py").write_text(f"print({str(folder)!r})\n")
    script = "\n".join([*imports(code, edited), f"{sys.executable} -m a; {sys.executable} -c 'import b, c'"])
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=edited,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(before)},
    )
    assert done.stdout.splitlines() == [str(code), str(before), str(before)], done.stderr


def test_a_reward_named_by_its_file_runs_from_the_snapshot(user_code: Path, tmp_path: Path) -> None:
    file = user_code / "file.py"
    file.write_text("def f(completions, **columns):\n    return [0.25 for _ in completions]\n")
    code = snapshot.take({f"{file}:f": 1.0}, tmp_path)
    file.write_text("raise SystemExit('edited')\n")
    call = (
        "import sys; from hpcgrpo import rewards\n"
        "built = rewards.build({sys.argv[1]: 1.0}, max_completion_length=1, num_processes=1)\n"
        "print(built.parts[0].function(completions=['a']))"
    )
    command = [sys.executable, "-c", call, f"{file}:f"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "HPCGRPO_CODE": str(code)}
    )
    assert done.stdout == "[0.25]\n", done.stderr
    assert "edited" in subprocess.run(command, capture_output=True, text=True).stderr


# ---- the cluster's words

PARTITIONS = """\
PartitionName=main AllowGroups=ALL Default=YES MaxNodes=UNLIMITED MaxTime=1-00:00:00 TotalNodes=6 State=UP
PartitionName=short AllowGroups=ALL Default=NO MaxNodes=2 MaxTime=00:10:00 TotalNodes=6 State=UP
"""


def test_partitions_are_chosen_by_name_or_default() -> None:
    known = partitions.read(PARTITIONS)
    assert partitions.choose(None, known) == ["main"]
    assert partitions.choose("short,main", known) == ["short", "main"]
    with pytest.raises(ConfigError, match=r"slurm_partition mian: .*did you mean main\?.*main, short"):
        partitions.choose("main,mian", known)
    with pytest.raises(ConfigError, match="no default one; name one of short"):
        partitions.choose(None, {"short": known["short"]})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nodes": 6, "timeout_min": 1440}, None),
        ({"nodes": 7}, "cluster.nodes 7: partition main grants a job 6 at most"),
        ({"timeout_min": 1441}, "cluster.timeout_min 1441: partition main grants 1440 minutes"),
        ({"slurm_partition": "short", "nodes": 3}, "cluster.nodes 3: partition short grants a job 2 at most"),
        ({"slurm_partition": "short", "timeout_min": 11}, "partition short grants 10 minutes"),
    ],
)
def test_a_job_fits_into_its_partition(keys: dict[str, object], said: str | None) -> None:
    job = job_for(loaded().model_copy(update={"cluster": ClusterConfig(**keys)}))
    known = partitions.read(PARTITIONS)
    asked = job.options.get("partition")
    (name,) = partitions.choose(str(asked) if asked else None, known)
    if said is None:
        partitions.check(job, known[name])
        return
    with pytest.raises(ConfigError, match=said):
        partitions.check(job, known[name])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"nodes": 2, "gpus_per_node": 8}, None),
        ({"nodes": 3, "gpus_per_node": 4}, None),
        (
            {"nodes": 3, "gpus_per_node": 8},
            "cluster.gpus_per_node 8: 3 nodes with 8 GPUs .*has 2 .*node is 8",
        ),
        ({"nodes": 1, "gpus_per_node": 8, "slurm_gres": "gpu:a100:8"}, None),
        ({"nodes": 2, "gpus_per_node": 8, "slurm_gres": "gpu:a100:8"}, "slurm_gres gpu:a100:8: .*a100 GPUs"),
        ({"nodes": 9, "gpus_per_node": 8, "slurm_gres": "gpu:8,nvme:1"}, None),  # left to sbatch
        ({"nodes": 9}, None),
    ],
)
def test_enough_nodes_have_the_gpus(keys: dict[str, object], said: str | None) -> None:
    listed = "n1|gpu:a100:8(S:0-1),nvme:1\nn2|gpu:8\nn3|gpu:v100:4\nn4|(null)\n"
    job = job_for(loaded().model_copy(update={"cluster": ClusterConfig(**keys)}))
    if said is None:
        partitions.check_gpus(job, "main", listed)
        return
    with pytest.raises(ConfigError, match=said):
        partitions.check_gpus(job, "main", listed)


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("1-02:03:00", 1563), ("00:10:00", 10), ("12:00:30", 720.5), ("UNLIMITED", None), ("", None)],
)
def test_time_limits(limit: str, minutes: float | None) -> None:
    assert partitions.minutes(limit) == minutes


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("Invalid partition name specified", "cluster.slurm_partition"),
        ("Node count specification invalid", "cluster.nodes"),
        ("Requested node configuration is not available", "cluster.nodes, cluster.gpus_per_node"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "cluster.timeout_min"),
        ("Invalid account or account/partition combination specified", "cluster.slurm_account"),
        ("Invalid qos specification", "cluster.slurm_qos"),
        ("Invalid feature specification", "cluster.slurm_constraint"),
        ("Invalid node name specified", "cluster.slurm_nodelist"),
        ("Invalid generic resource (gres) specification", "cluster.gpus_per_node"),
        ("User's group not permitted to use this partition", "cluster.slurm_partition"),
        ("Memory specification can not be satisfied", "cluster.mem_gb"),
        ("CPU count per node can not be satisfied", "cluster.cpus_per_task"),
        ("Job dependency problem", "cluster.slurm_dependency"),
        ("Job violates accounting/QOS policy (job submit limit)", "cluster.nodes, cluster.gpus_per_node"),
        ("Requested reservation is invalid", "cluster.slurm_additional_parameters"),
        ("something never heard of", "cluster.nodes, cluster.gpus_per_node"),
    ],
)
def test_refusals_name_the_key(words: str, key: str) -> None:
    job = job_for(loaded("cluster: {nodes: 2, gpus_per_node: 8}"))
    said = f"sbatch: error: {words}\nsbatch: error: Batch job submission failed: {words}"
    error = str(queue.refusal(said, job))
    assert error.startswith(f"{key}: ") or error.startswith(f"{key},")
    assert f"Slurm refuses the job ({words})" in error and error.endswith("--nodes=2 --gpus-per-node=8")


def test_sbatch_s_variables_do_not_beat_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_ACCOUNT", "SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.setenv(name, "x")
    kept = queue.environment({"partition": "main", "time": "5"})
    assert {k for k in kept if k.startswith(("SBATCH_", "SLURM_"))} == {"SBATCH_ACCOUNT", "SLURM_CONF"}


def test_without_slurm_it_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    command = [sys.executable, "-m", "hpcgrpo.cli", "submit", "run.yaml"]
    place = {"cwd": tmp_path, "env": {**os.environ, "PATH": str(tmp_path)}}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **place)  # type: ignore[call-overload]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "no Slurm on this machine" in done.stderr and "--executor local" in done.stderr
    assert not (tmp_path / "logs").exists()
