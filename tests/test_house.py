"""The architecture: what may import what, what is safe by default, and the shape of the code."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree, ignore_patterns
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = Path(sysconfig.get_path("scripts"))
SOURCES = sorted(p for folder in ("hpcgrpo", "evaluation") for p in (ROOT / folder).rglob("*.py"))
TREES = {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in SOURCES}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# What a login node runs; torch takes tens of seconds to import on many cluster file systems.
LOGIN_NODE = ("cli", "config", "types", "algorithms", "rewards", "tasks", "checks", "doctor")
LOGIN_NODE += ("report.command", "planner.command")
LOGIN_NODE += (
    "study.design",
    "study.command",
    "study.local",
    "study.array",
    "study.statistics",
    "study.tables",
)
LOGIN_NODE += ("launch.job", "launch.sbatch", "launch.queue", "launch.follow", "launch.submit", "launch.node")
IMPORTED_ONCE = ("vllm", "deepspeed", "submitit", "math_verify")
# Where an engine is vLLM's, which is what vLLM calls it.
OF_VLLM = ("hpcgrpo/generators.py", "hpcgrpo/sections.py", "hpcgrpo/generation/", "hpcgrpo/launch/",
           "evaluation/config.py", "evaluation/serving.py")  # fmt: skip
BANNED = ("util", "helper", "manager", "engine", "worker", "trajectory", "trajectorie", "episode")
UNSAFE_MODULES = ("pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of the modules that a file imports, wherever in the file and in whichever form."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            yield from (str(a.value).split(".")[0] for a in node.args[:1] if isinstance(a, ast.Constant))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a name or a chain of attributes, else the empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def given(call: ast.Call, name: str) -> object:
    """The constant that a call passes by keyword; None where it passes none or not a constant."""
    for keyword in call.keywords:
        if keyword.arg == name and isinstance(keyword.value, ast.Constant):
            return keyword.value.value
    return None


def unsafe(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Ways for bytes or text that came from elsewhere to run as code: (line, what)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, f"imports {m}") for m in imported(node) if m in UNSAFE_MODULES)
        if isinstance(node, ast.AnnAssign | ast.Assign | Function):
            yield from ((line, "trust_remote_code on by default") for line in trusting(node))
        if isinstance(node, ast.Call):
            yield from ((node.lineno, reason) for reason in unsafe_call(node))


def unsafe_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    if name in ("eval", "exec", "compile", "os.system", "os.popen"):
        yield f"calls {name}"
    if name == "torch.load" and given(call, "weights_only") is not True:
        yield "torch.load without weights_only=True"
    if name.endswith("yaml.load"):
        yield "yaml.load instead of yaml.safe_load"
    yield from (
        f"{flag}=True" for flag in ("trust_remote_code", "allow_pickle", "shell") if given(call, flag) is True
    )


def trusting(node: ast.AST) -> Iterator[int]:
    """Lines where a field, variable or argument called trust_remote_code is True unless said otherwise."""
    found: list[tuple[str, ast.expr | None]] = []
    if isinstance(node, Function):
        positional = [*node.args.posonlyargs, *node.args.args][::-1]
        found += [(a.arg, d) for a, d in zip(positional, node.args.defaults[::-1], strict=False)]
        found += [(a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    elif isinstance(node, ast.AnnAssign):
        found += [(dotted(node.target), node.value)]
    elif isinstance(node, ast.Assign):
        found += [(dotted(target), node.value) for target in node.targets]
    for name, value in found:
        if (
            name.split(".")[-1] == "trust_remote_code"
            and isinstance(value, ast.Constant)
            and value.value is True
        ):
            yield value.lineno


def named(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file gives: functions, classes, arguments, variables, attributes, aliases."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield 0, node.asname


def words(name: str) -> list[str]:
    """`WeightTransferEngine`, `num_workers` -> their words, lower case and without a plural s."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", name)
    return [part.lower().removesuffix("s") for part in parts]


def functions(tree: ast.AST) -> Iterator[tuple[Function, int]]:
    """Each function with its number of lines, docstring left out."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            assert node.end_lineno is not None
            taken = (doc.end_lineno or 0) - doc.lineno + 1 if doc else 0
            yield node, node.end_lineno - node.lineno + 1 - taken


# ---- imports


def test_imports_only_point_down() -> None:
    tool = SCRIPTS / "lint-imports"
    if not tool.exists():
        pytest.skip("import-linter is not installed in this environment")
    done = subprocess.run([tool, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@pytest.mark.parametrize("library", IMPORTED_ONCE)
def test_a_heavy_library_is_imported_in_one_module(library: str) -> None:
    places = [path for path, tree in TREES.items() if library in imported(tree)]
    assert len(places) <= 1, f"{library} is imported in {places}"


@pytest.mark.parametrize("module", LOGIN_NODE)
def test_a_login_node_does_not_import_torch(module: str) -> None:
    done = python(
        f"import sys, hpcgrpo.{module}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "", f"hpcgrpo.{module} imports {done.stdout.strip()}"


def test_help_is_quick() -> None:
    def cpu_seconds() -> float:
        with subprocess.Popen(
            [SCRIPTS / "hpcgrpo", "--help"], stdout=subprocess.DEVNULL, cwd=ROOT
        ) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    taken = [cpu_seconds() for _ in range(5)]
    assert median(taken) < 0.3, f"hpcgrpo --help took {taken} CPU-seconds"


# ---- safety


def test_nothing_that_came_from_elsewhere_can_run_as_code() -> None:
    found = [f"{path}:{line}: {what}" for path, tree in TREES.items() for line, what in unsafe(tree)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "__import__('os'); eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "class Model:\n    trust_remote_code: bool = True",
        "def load(name, trust_remote_code=True): ...",
        "def load(name, *, trust_remote_code=True): ...",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_safety_check_finds(code: str) -> None:
    assert list(unsafe(ast.parse(code)))


def test_the_safety_check_lets_safe_forms_pass() -> None:
    code = """
        torch.load(path, weights_only=True)
        model.eval()
        re.compile(text)
        trust_remote_code: bool = False
        AutoModel.from_pretrained(name, trust_remote_code=config.trust_remote_code)
        def load(name, local=True, *, trust_remote_code=False, quiet=True): ...
        yaml.safe_load(text)
    """
    assert not list(unsafe(ast.parse("\n".join(line.strip() for line in code.splitlines()))))


# ---- shape


def test_no_name_says_nothing() -> None:
    found = [
        f"{path}:{line}: {name}"
        for path, tree in TREES.items()
        for line, name in [(0, Path(path).stem), *named(tree)]
        for word in set(words(name)) & set(BANNED)
        if not (word == "engine" and str(path).startswith(OF_VLLM))
    ]
    assert not found, "\n".join(found)


def test_words_of_a_name() -> None:
    assert words("WeightTransferEngine") == ["weight", "transfer", "engine"]
    assert words("_num_workers2") == ["num", "worker", "2"]
    assert words("KVTrajectories") == ["kv", "trajectorie"]


def test_files_and_functions_are_short() -> None:
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    found = [f"{path}: {n} lines, 400 at most" for path, n in lines.items() if n > 400]
    sizes = [(f"{path}:{f.lineno}: {f.name}", n) for path, tree in TREES.items() for f, n in functions(tree)]
    found += [f"{name}: {n} lines, 60 at most" for name, n in sizes if n > 60]
    assert not found, "\n".join(found)
    assert median(n for _, n in sizes) <= 10


def test_public_functions_and_classes_say_what_they_do() -> None:
    found = [
        f"{path}:{node.lineno}: {node.name}"
        for path, tree in TREES.items()
        for node in tree.body
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]
    assert not found, "\n".join(found)


# ---- packaging


def test_every_package_is_listed_to_be_built() -> None:
    folders = {ROOT / "hpcgrpo" / "data", *(path.parent for path in SOURCES)}
    names = {str(folder.relative_to(ROOT)).replace("/", ".") for folder in folders}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == names


def test_the_quickstart_configuration_is_the_packaged_one() -> None:
    shown, packaged = ROOT / "configs" / "quickstart.yaml", ROOT / "hpcgrpo" / "data" / "quickstart.yaml"
    assert shown.resolve() == packaged and not packaged.is_symlink()


@pytest.mark.slow
def test_a_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for package in ("hpcgrpo", "evaluation"):
        copytree(ROOT / package, tmp_path / package, ignore=ignore_patterns("__pycache__"))
    build = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    built = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = [path for package in ("hpcgrpo", "evaluation") for path in (ROOT / package).rglob("*")]
    kept = [path for path in kept if path.is_file() and path.suffix != ".pyc"]
    assert built == {str(path.relative_to(ROOT)) for path in kept}
