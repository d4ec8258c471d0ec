"""Direction of imports, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted(ROOT.glob("vlm/**/*.py")), ROOT / "train.py"]

# Modules of the top floor: they import nothing of vlm but each other, and anything may import them.
BASE = ("vlm", "vlm.errors", "vlm.machine", "vlm.randomness")
FLOORS = (
    ("untrusted", "nn"),
    ("models",),
    ("io", "config", "decoding", "data"),
    ("checkpoint", "evaluation", "inference"),
)
FLOORS += (("training",), ("tasks",), ("serving", "api"), ("cli", "__main__"))
LEVELS = {f"vlm.{name}": level for level, names in enumerate(FLOORS) for name in names}
LAZY = {("vlm.models.timm_encoder", "timm"), ("vlm.models.pretrained.folder", "safetensors")}  # only when used
LAZY |= {("vlm.models.pretrained.gguf.file", "gguf"), ("vlm.decoding.grammar", "llguidance")}
LAZY |= {("vlm.checkpoint.locate", "huggingface_hub"), ("vlm.checkpoint.export", "safetensors")}
LAZY |= {("vlm.tasks.captioning.shard_captions", "pyarrow"), ("vlm.tasks.captioning.shard_captions", "ray")}
LAZY |= {("vlm.tasks.embedding.predict", "pyarrow"), ("vlm.io.files", "pyarrow")}
INFERENCE = {"torch", "numpy", "PIL", "regex", "sentencepiece", "tokenizers", "vlm", *sys.stdlib_module_names}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in FILES}


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


def is_within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def level(name: str) -> int:
    """Floor of a module; train.py stands above all."""
    return next((place for package, place in LEVELS.items() if is_within(name, package)), len(FLOORS))


def reachable_modules(*starts: str) -> set[str]:
    """The modules that some import, directly or through others, as they are themselves imported."""
    waiting, seen = [*starts], set[str]()
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += [module for module, outside in imports(NAMES[name]) if outside and module in NAMES]
    return seen


# What using a model imports.
USING = sorted(reachable_modules("vlm.inference.predictor", *(name for name in NAMES if name.endswith(".predict"))))


def test_the_files_are_found():
    assert {"vlm.nn.attention", "vlm.checkpoint.load", "vlm.training.step.task", "train"} <= {*NAMES}
    assert ("vlm.checkpoint.load", True) in imports(ROOT / "vlm/inference/predictor.py")
    assert ("timm", False) in imports(ROOT / "vlm/models/timm_encoder.py")


def test_the_top_floor_holds_few_modules():
    modules = {path.stem for path in ROOT.glob("vlm/*.py")} - {"__init__", "__main__"}
    assert len(modules) <= 5 and {f"vlm.{name}" for name in modules} <= set(BASE) | {"vlm.api"}


def goes_one_way(name):
    ours = {module for module, _ in imports(NAMES[name]) if is_within(module, "vlm")} - {name, *BASE}
    if name in BASE:
        return ours <= ({"vlm.api"} if name == "vlm" else set())
    return all(level(module) <= level(name) for module in ours)


def test_imports_go_one_way():
    assert [name for name in NAMES if not goes_one_way(name)] == []


def test_no_circles():
    """No module reaches itself by imports, lazy ones included."""
    edges = {name: {f for f, _ in imports(path) if f in NAMES and f != name} for name, path in NAMES.items()}
    edges.pop("vlm")
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for found in sorted(edges.get(name, ())):
                visit(found, (*trail, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_using_a_model_needs_few_libraries():
    for name in USING:
        for module, outside in imports(NAMES[name]):
            package = module.partition(".")[0]
            assert package in INFERENCE or (not outside and (name, package) in LAZY), (name, module)


@pytest.mark.parametrize("library", ["hydra", "omegaconf"])
def test_few_files_know_hydra(library):
    knowing = {module_name(path) for path in FILES if any(is_within(found, library) for found, _ in imports(path))}
    assert not {name for name in knowing if not is_within(name, "vlm.config", "vlm.cli", "train")}


PACKAGES = [path for path in FILES if path.name == "__init__.py" and path.parent != ROOT / "vlm"]


def test_packages_import_nothing():
    for path in PACKAGES:
        assert not imports(path), path
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            assert docstring or isinstance(node, ast.Assign), path


def test_captioning_loads_no_training_library():
    program = (
        "import sys, vlm.tasks.captioning.predict; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert {"torch", "vlm"} <= loaded
    unwanted = {"lightning", "torchvision", "timm", "torchmetrics", "hydra", "omegaconf", "matplotlib"}
    unwanted |= {"sentencepiece", "tokenizers"}
    assert not loaded & unwanted
