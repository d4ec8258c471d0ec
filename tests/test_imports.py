"""Who may import whom, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted(ROOT.glob("vlm/**/*.py")), ROOT / "train.py"]

BASE = ("vlm", "vlm.errors", "vlm.randomness")  # import nothing of vlm but each other; anybody may import them
ORDER = ["vlm.nn", "vlm.models", "vlm.generation", "vlm.inference", "vlm.tasks", ("vlm.callbacks", "vlm.report")]
LEVELS = {name: level for level, names in enumerate(ORDER) for name in ([names] if isinstance(names, str) else names)}
LEVELS["vlm.checkpoint"] = LEVELS["vlm.verify"] = LEVELS["vlm.models"]
TOP = len(ORDER)  # train.py, cli.py and what puts a run together for them
SIDES = ("vlm.metrics", "vlm.data")
SHARED = ("vlm.data.image", "vlm.data.image_guard", "vlm.data.resize", "vlm.data.tokenizer")
LAZY = {("vlm.models.timm_encoder", "timm"), ("vlm.models.hugging_face_files", "safetensors")}  # only when used
INFERENCE = {"torch", "numpy", "PIL", "sentencepiece", "vlm", *sys.stdlib_module_names}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path) for path in FILES}


@cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Each module that a file imports at any place, and whether it does when it is itself imported."""
    return list(_imports(path))


def _imports(path: Path) -> Iterator[tuple[str, bool]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inner = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        outside = id(node) not in inner
        if isinstance(node, ast.Import):
            yield from ((alias.name, outside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in NAMES else node.module or "", outside)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def level(name: str) -> int:
    return next((LEVELS[package] for package in LEVELS if within(name, package)), TOP)


def for_inference(name: str) -> bool:
    return level(name) <= LEVELS["vlm.inference"] or name in (*SHARED, *BASE)


def test_the_files_are_found():
    assert {"vlm.nn.attention", "vlm.checkpoint", "vlm.tasks.base", "vlm.data.image", "train"} <= NAMES
    assert ("vlm.checkpoint", True) in imports(ROOT / "vlm/inference/captioning.py")
    assert ("timm", False) in imports(ROOT / "vlm/models/timm_encoder.py")


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_one_way(path):
    name = module_name(path)
    ours = {found for found, _ in imports(path) if within(found, "vlm")} - {name}
    if name in BASE:
        allowed = set(BASE)
    elif within(name, *SIDES):
        allowed = {found for found in ours if within(found, *SIDES) or found in BASE}
        if name in SHARED:
            allowed &= {*SHARED, *BASE}
    else:
        sides = SHARED if for_inference(name) else SIDES
        if level(name) < LEVELS["vlm.inference"]:
            sides = ()
        allowed = {found for found in ours if found in BASE or within(found, *sides)}
        allowed |= {found for found in ours if not within(found, *SIDES) and level(found) <= level(name)}
    assert ours <= allowed


@pytest.mark.parametrize("path", [path for path in FILES if for_inference(module_name(path))], ids=module_name)
def test_using_a_model_needs_few_libraries(path):
    for found, outside in imports(path):
        package = found.partition(".")[0]
        assert package in INFERENCE or (not outside and (module_name(path), package) in LAZY)


@pytest.mark.parametrize("library", ["hydra", "omegaconf"])
def test_few_files_know_hydra(library):
    knowing = {module_name(path) for path in FILES if any(within(found, library) for found, _ in imports(path))}
    strangers = {name for name in knowing if not name.startswith("vlm.config") and name not in ("train", "vlm.cli")}
    assert not strangers


@pytest.mark.parametrize("name", ["cli", "data_commands"])
def test_the_command_line_starts_without_torch(name):
    at_once = {found.partition(".")[0] for found, outside in imports(ROOT / f"vlm/{name}.py") if outside}
    assert not at_once & {"torch", "lightning", "hydra", "torchvision", "timm", "numpy"}


@pytest.mark.parametrize("path", [path for path in FILES if path.name == "__init__.py"], ids=module_name)
def test_packages_import_nothing(path):
    assert not imports(path)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert docstring or isinstance(node, ast.Assign)


def test_captioning_loads_no_training_library():
    program = "import sys, vlm.inference.captioning; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"torch", "vlm"} <= loaded
    unwanted = {"lightning", "torchvision", "timm", "torchmetrics", "hydra", "omegaconf", "sentencepiece", "matplotlib"}
    assert not loaded & unwanted
