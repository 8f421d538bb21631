"""The command line as users meet it: clear errors with exit code 2 and no traceback, help without torch."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from runs import hpcgrpo, metrics, write_config

from hpcgrpo import cli


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("cli"))


def refused(*arguments: str) -> str:
    """What a command that must fail says on stderr."""
    done = hpcgrpo(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("hpcgrpo: error: ")
    return done.stderr


def data(folder: Path, text: str) -> str:
    path = folder / "data.jsonl"
    path.write_text(text)
    return f"data={{path: {path}}}"


GOOD = '{"prompt": "1234", "answer": "0"}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty file"),
        (GOOD + "\n[1]\n", "line 3: holds a list"),
        (GOOD + '{"prompt": \n', "line 2: malformed JSON"),
        (GOOD + '{"prompt": "12"}\n', "line 2: no column 'answer'"),
        (GOOD + '{"prompt": "12", "answer": ""}\n', "line 2"),
        (GOOD + "[1]\n", "line 2: holds a list"),
    ],
)
def test_bad_data_names_file_and_line(config: Path, tmp_path: Path, text: str, said: str) -> None:
    error = refused("train", str(config), data(tmp_path, text), f"output_dir={tmp_path}")
    assert said in error and "data.jsonl" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trian.max_steps=1", "did you mean train?"),
        ("train.max_stepz=1", "did you mean max_steps?"),
        ("train.train_batch_size=7", "nearest that are: 6 and 8"),
        ("train.max_steps=many", "given: 'many'"),
        ("data.path=/does/not/exist.jsonl", "generates its rows"),
        ("model_name_or_path=/does/not/exist", "no such folder"),
        ("algorithm.base.pruning_rate=1.0", "pruning_rate"),
        ("algorithm.drafts=0", "drafts"),
        ("generation.max_completion_length=100000", "max_completion_length"),
        ("train.train_batch_size=4096", "at most"),
    ],
)
def test_bad_configurations(config: Path, tmp_path: Path, override: str, said: str) -> None:
    assert said in refused("train", str(config), override, f"output_dir={tmp_path}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("eval m --dry-run", "--dry-run goes with --executor slurm: add that, or leave --dry-run out"),
        ("eval m --after 5", "--after goes with --executor slurm"),
        ("eval m --wait", "--wait goes with --executor slurm"),
        ("eval m --every 5", "--every goes with --rolling"),
        ("eval m --common-only", "--common-only goes with --compare"),
        ("eval --compare a b c", "--compare does not go with MODEL; leave one of them out"),
        ("eval --list --wait --executor slurm", "--list does not go with --executor, --wait"),
        ("eval m benchmarks=chain --rolling --executor slurm --dry-run", "--rolling does not go with --dry-run"),
        ("eval m benchmarks=chain --pass-n 4 num_samples=2", "--pass-n 4 is the number of samples; leave num_s"),
        ("eval m benchmarks=chain shards.cain=3", "shards: cain: 3: a benchmark of this evaluation (chain), and 1 or"),
        ("eval m benchmarks=[chain] shards.chain=0", "shards: chain: 0: a benchmark of this evaluation (chain), and 1"),
        ("eval m benchmarks=chain --rolling --every 0", "--every 0: each N-th checkpoint"),
        ("submit m.yaml --rolling", "--rolling goes with --eval"),
        ("plan m.yaml --output x.json", "--output goes with --calibrate or --sweep"),
        ("study m.yaml --wait", "--wait goes with --executor slurm"),
        ("train m.yaml --jobs 2", "--jobs goes with --sweep"),
        ("grade m.jsonl --limit 2", "--limit goes with --audit"),
    ],
)  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(
    config: Path, line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`m` stands for a run: nothing is read but by the last check, so that it may be any."""
    words = [str(config) if word == "m" else word for word in line.split()]
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"hpcgrpo: error: {said}")


def test_missing_files(config: Path, tmp_path: Path) -> None:
    assert "no such configuration file" in refused("train", str(tmp_path / "nothing.yaml"))
    gone = "data={path: nothing.jsonl}"
    assert "nothing.jsonl" in refused("check", str(config), gone)


# Root may read everything, unless it gives that up.
AS_ANYBODY = ("setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner") if os.geteuid() == 0 else ()


@pytest.mark.parametrize(
    "command",
    ["report", "doctor", "grade --audit", "eval benchmarks=gsm8k", "plan --lengths", "plan --calibrate"],
)
def test_anothers_folder_is_told_without_a_traceback(tmp_path: Path, config: Path, command: str) -> None:
    run = tmp_path / "theirs"
    run.mkdir()
    run.chmod(0)
    name, *options = command.split()
    if name == "eval":
        words = [name, str(run), *options]
    else:
        words = [name, *([str(config)] if "--lengths" in options else []), *options, str(run)]
    _denied(words, f"the owner of {run} is {pwd.getpwuid(os.geteuid()).pw_name}")


def test_a_profile_where_nothing_can_be_written_says_so(tmp_path: Path, config: Path) -> None:
    error = refused("profile", str(config), "output_dir=/dev/null", "--algorithms", "igrpo")
    assert "/dev/null/run-profile: /dev/null is no folder; name another place (output_dir=" in error
    tmp_path.chmod(0o555)
    words = ["profile", str(config), f"output_dir={tmp_path}", "--algorithms", "igrpo"]
    _denied(words, f"the owner of {tmp_path} is {pwd.getpwuid(os.geteuid()).pw_name}")


def _denied(words: list[str], said: str) -> None:
    asked = [*AS_ANYBODY, sys.executable, "-m", "hpcgrpo.cli", *words]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("hpcgrpo: error: ")
    assert f"permission denied ({said}); ask for access" in done.stderr


def test_errors_of_a_jobs_parts_and_of_no_path_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(error: OSError) -> None:
        raise error

    denied = PermissionError(13, "Permission denied", "/etc/shadow")
    monkeypatch.setitem(cli.BODIES, "rank", lambda _: fails(denied))
    with pytest.raises(PermissionError):
        cli.main(["rank", "run.yaml"])
    monkeypatch.setitem(cli.BODIES, "doctor", lambda _: fails(PermissionError(1, "Operation not permitted")))
    with pytest.raises(PermissionError):
        cli.main(["doctor", "logs/run"])


@pytest.mark.parametrize("name", [".lock", ".launcher"])  # its ranks are up, or about to be
def test_a_folder_in_use_by_a_live_run_is_left_alone(config: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with (folder / name).open("w") as lock:
        lock.write("pid 1 on here")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        for options in ((), ("--fresh",)):
            error = refused("train", str(config), f"output_dir={tmp_path}", *options)
            assert "live run (pid 1 on here)" in error
    assert not (folder / "config.yaml").exists()


def test_an_output_folder_that_cannot_be_written(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output_dir in (tmp_path / "file", tmp_path / ("x" * 300)):
        assert "cannot be written" in refused("train", str(config), f"output_dir={output_dir}")


@pytest.mark.slow
def test_a_damaged_model_and_a_reward_that_exits_end_the_run_with_a_message(
    config: Path, tmp_path: Path
) -> None:
    """What only a rank can find: missing tensors would be filled with random numbers by transformers."""
    from runs import make_model
    from safetensors.torch import load_file, save_file

    output = f"output_dir={tmp_path}/logs"
    model = make_model(tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    error = refused("train", str(config), f"model_name_or_path={model}", output)
    assert "1 weights are missing, such as model.norm.weight" in error
    (model / "model.safetensors").write_bytes(b"junk" * 100)
    assert "model.safetensors: damaged" in refused(
        "train", str(config), f"model_name_or_path={model}", output
    )
    (tmp_path / "rewards.py").write_text("import sys\ndef leave(completions, **columns):\n    sys.exit(0)\n")
    reward = f"rewards={{'{tmp_path}/rewards.py:leave': 1.0}}"
    assert "reward leave raised SystemExit" in refused("train", str(config), reward, output)
    (tmp_path / "rewards.py").write_text("import os\ndef leave(completions, **columns):\n    os._exit(0)\n")
    done = hpcgrpo("train", str(config), reward, output)
    assert done.returncode == 1
    assert "rank 0 ended with exit code 0 before its work was done" in done.stderr


@pytest.mark.slow
def test_a_run_that_no_reward_scores_says_so_once(tmp_path: Path) -> None:
    """Steps 1 and 2 get a number, the others None: 0 as reward, told once, and counted in each step's metrics."""
    (tmp_path / "rewards.py").write_text(
        "calls = []\ndef early(completions, **columns):\n    calls.append(1)\n"
        "    return [float(i) if len(calls) <= 2 else None for i in range(len(completions))]\n"
    )
    done = hpcgrpo(
        "train", str(write_config(tmp_path)), f"output_dir={tmp_path}", "report_to=[]", "train.max_steps=4",
        "train.num_iterations=1", "algorithm={name: grpo, num_generations: 4}",
        f"rewards={{'{tmp_path}/rewards.py:early': 1.0}}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = metrics(tmp_path / "run")
    assert [step.get("completions/unscored") for step in steps] == [None, None, 1.0, 1.0]
    assert [step["reward"] for step in steps] == [3.5, 3.5, 0.0, 0.0]
    assert done.stderr.count("every reward gave None for every completion") == 1
    assert "warning: step 3: " in done.stderr


@pytest.mark.slow
def test_a_model_without_chat_template(config: Path, tmp_path: Path) -> None:
    """Needs the tokenizer, so it is found by the rank (and by check), still as a clean error."""
    from runs import make_model

    model = make_model(tmp_path / "plain")
    (model / "chat_template.jinja").unlink()
    for command in ("check", "train"):
        error = refused(command, str(config), f"model_name_or_path={model}", f"output_dir={tmp_path}")
        assert "no chat template" in error


def test_check_prints_the_counts_and_both_prompts(config: Path) -> None:
    done = hpcgrpo("check", str(config), "--json")
    report = json.loads(done.stdout)
    assert report["counts"]["prompts_per_step"] == 4  # 8 completions, 2 kept of each prompt's 4
    assert report["counts"]["completions_per_step"] == 4 * (2 + 4)
    assert report["counts"]["updates_per_step"] == 2
    question = report["prompts"]["draft"].removesuffix("=")
    assert report["prompts"]["refinement"].startswith(question + "#")
    assert report["prompts"]["refinement"].endswith("#" + question + "=")
    assert [r["parts"]["accuracy"] for r in report["rewards"]] == [1.0, 0.0]
    assert (report["servers"], report["warnings"], report["not_checked"]) == (None, [], [])
    shown = hpcgrpo("check", str(config))
    assert shown.returncode == 0 and question in shown.stdout
    assert "rewards of a sample" in shown.stdout and "1 (right)" in shown.stdout


def test_algorithms_lists_every_option_with_its_default() -> None:
    rows = json.loads(hpcgrpo("algorithms", "--json").stdout)
    found = {(r["algorithm"], r["option"]): r["default"] for r in rows}
    assert found["grpo", "epsilon"] == "0.2"
    assert found["dapo", "epsilon_high"] == "0.28"
    assert found["igrpo", "drafts"] == "4"
    assert found["cppo", "pruning_rate"] == "required"
    assert "one of bnpo, codistill, cppo, dapo" in refused("algorithms", "gropo")


@pytest.mark.parametrize("command", ["train", "check", "algorithms", "quickstart", "import-gguf"])
def test_every_command_has_help(command: str) -> None:
    done = hpcgrpo(command, "--help")
    assert done.returncode == 0 and "usage: hpcgrpo" in done.stdout
