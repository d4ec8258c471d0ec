"""What our code must not contain, since it would run, unpack or fetch what a stranger's file asks for."""

import ast
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FILES = [*sorted(ROOT.glob("vlm/**/*.py")), ROOT / "train.py"]
# Names that may not be imported or called anywhere in vlm, in whatever way they are reached.
FORBIDDEN = {
    *("pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    *("eval", "exec", "compile", "__import__", "execfile"),
    *("extractall", "extract", "unpack_archive"),
    *("system", "popen", "getoutput", "getstatusoutput", "mktemp"),
    *("add_safe_globals", "unsafe_load", "full_load", "load_all", "UnsafeLoader", "FullLoader"),
}
METHODS = {"eval", "compile"}  # of modules and of regular expressions, which run no text
ROLES = {"system"}  # a role of a conversation; os.system is what must not be called


@cache
def nodes(path):
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def code_of(path):
    """The source without comments and strings."""
    kept = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.NEWLINE)
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return " ".join(token.string for token in tokens if token.type in kept)


def test_there_is_code_to_search():
    assert len(FILES) > 60


def names_of(node):
    """The names that a node reaches a thing by."""
    if isinstance(node, ast.Name):
        return {node.id} - ROLES
    if isinstance(node, ast.Attribute):
        of_os = isinstance(node.value, ast.Name) and node.value.id == "os"
        return {node.attr} - METHODS - (set() if of_os else ROLES)
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
        return {part for name in names for part in name.split(".")}
    return set()


@pytest.mark.slow
def test_no_name_that_runs_or_unpacks_what_a_file_holds():
    named = ((path, node, names_of(node) & FORBIDDEN) for path in FILES for node in nodes(path))
    assert [(str(path), node.lineno, names) for path, node, names in named if names] == []


def loads_no_code(path):
    code = code_of(path)
    calls = code.replace("weights_only : bool | None = None", "")
    assert not re.search(r"weights_only = (?!True\b)(?!\w+ [,)])", calls)
    assert not re.search(r"\byaml \. (?!safe_load|safe_dump|YAMLError|MarkedYAMLError)", code)
    assert not re.search(r"allow_pickle = (?!False\b)", code)
    assert not re.search(r"shell = (?!False\b)", code)
    assert "trust_remote_code" not in code and "hub . load" not in code
    for node in nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            assert given.get("weights_only") == "True", f"line {node.lineno}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("np.load", "numpy.load"):
            assert any(keyword.arg == "allow_pickle" for keyword in node.keywords), f"line {node.lineno}"


@pytest.mark.slow
def test_nothing_is_loaded_but_weights_and_plain_yaml():
    for path in FILES:
        loads_no_code(path)


@pytest.mark.slow
def test_checkpoints_are_read_in_one_place():
    found = [path.relative_to(ROOT).as_posix() for path in FILES if "torch . load (" in code_of(path)]
    assert found == ["vlm/checkpoint/file.py"]


def test_no_shell_is_started():
    shell = re.compile(r"[\"'/](sh|bash|zsh|dash)[\"'](?!, \"interactive\")")  # that is the name of a job
    found = [path.relative_to(ROOT).as_posix() for path in FILES if shell.search(path.read_text(encoding="utf-8"))]
    assert found == []


def test_names_become_modules_in_five_places():
    """Names are checked first: of a config, a checkpoint, a task, a kind of folder, a package that its user trusts."""
    found = [path.relative_to(ROOT).as_posix() for path in FILES if "import_module" in code_of(path)]
    known = ("checkpoint/rebuild", "config/target", "inference/predictor", "inference/tasks")
    assert set(found) <= {f"vlm/{name}.py" for name in (*known, "models/pretrained/architecture")}


def test_the_constraints_pin_against_known_advisories():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)

    def version(name):
        return tuple(int(part) for part in pins[name].split(".")[:3])

    assert version("hydra-core") >= (1, 3, 7)
    assert version("sentencepiece") >= (0, 2, 3)
    assert version("pillow") >= (12, 0, 0)
    assert version("torch") >= (2, 10)  # of its reader with weights_only=True
    assert pins["lightning"] not in ("2.6.2", "2.6.3")
    assert pins["pytorch-lightning"] not in ("2.6.2", "2.6.3")
    project = (ROOT / "pyproject.toml").read_text()
    assert "!=2.6.2,!=2.6.3" in project
    for name in ("hydra-core", "pillow"):  # floors would refuse machines that have older ones
        floor = re.search(rf'"{name}>=([\d.]+)', project)[1]
        assert tuple(map(int, floor.split("."))) < version(name)
