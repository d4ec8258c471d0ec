"""The tests lie as the package does, and the package is written in plain words."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OWN = {"helpers", "journeys", "reliability", "benchmarks"}  # helpers hold no tests; the others cross the whole package

ROOT = TESTS.parent
CODE = [ROOT / "train.py", *sorted(ROOT.glob("vlm/**/*.py")), *sorted(ROOT.glob("benchmarks/**/*.py"))]
QUESTIONS = ("what", "who", "where", "whether", "how", "which")
VAGUE = {"found", "given", "made", "told", "said"}


def folders(root: Path) -> set[str]:
    """Folders that hold Python, relative to the root."""
    return {str(path.parent.relative_to(root)) for path in root.rglob("*.py")}


def test_every_folder_of_tests_is_one_of_the_package():
    ours = {folder for folder in folders(TESTS) if folder.split("/")[0] not in OWN}
    assert ours <= folders(TESTS.parent / "vlm")


def test_helpers_and_tests_lie_apart():
    """`pythonpath` names the helpers' folder alone."""
    strays = [path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
    assert all(path.is_relative_to(TESTS / "helpers") for path in strays)
    assert not [*TESTS.glob("helpers/**/test_*.py")]


def questions(tree: ast.Module) -> Iterator[str]:
    """The docstrings that begin with a question word."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            if docstring.partition(" ")[0].strip(",:;.?").lower() in QUESTIONS:
                yield docstring.splitlines()[0]


def vague_names(tree: ast.Module) -> Iterator[str]:
    """The arguments and variables whose name is a participle for anything."""
    for node in ast.walk(tree):
        name = node.arg if isinstance(node, ast.arg) else node.id if isinstance(node, ast.Name) else ""
        if name in VAGUE:
            yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize("faults", [questions, vague_names])
def test_docstrings_and_names_state_their_noun(faults):
    """`found` may be anything; `path`, `faults` or `answers` may not."""
    code = 'def f(found):\n    "Where a text begins."\n    return found\n'
    assert list(faults(ast.parse(code)))  # the check itself sees them
    lines = {path.relative_to(ROOT): list(faults(ast.parse(path.read_text("utf-8")))) for path in CODE}
    assert not {str(path): wrong for path, wrong in lines.items() if wrong}
