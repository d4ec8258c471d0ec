"""A small folder of configs, a small package of classes, and ways of asking `vlm.config` about them."""

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import vlm.training.config.check  # noqa: F401 limits the arguments of Lightning's classes and torch's
from vlm.config import command, compose, target
from vlm.errors import UserError

FILES = {
    "config.yaml": """
        defaults: [_self_, {model: tiny}, {data: shapes}, {optim: adamw}, {task: captioning}, optional experiment: null]
        seed: 0
        name: ${task_name}
    """,
    "model/tiny.yaml": """
        defaults: [{encoder: vit}]
        dim: 8
        twice: ${sum:${model.dim},${model.dim}}
    """,
    "model/encoder/vit.yaml": "depth: 2\nwidth: ${model.dim}",
    "model/encoder/resnet.yaml": "blocks: 3",
    "data/shapes.yaml": "size: 64\nnum_workers: 1\nroot: null",
    "data/captions.yaml": "size: 224\nnum_workers: 4\nroot: ???",
    "data/flickr8k.yaml": "size: 224\nnum_workers: 4\nroot: data/flickr8k",
    "optim/adamw.yaml": "_target_: torch.optim.AdamW\n_partial_: true\nlr: 0.001\nbetas: [0.9, 0.98]",
    "task/captioning.yaml": "# @package _global_\ntask_name: captioning\ntask: {smoothing: 0.0}",
    "experiment/long.yaml": "# @package _global_\nseed: 9",
}

PARTS = '''
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Required, TypedDict, Unpack

from vlm.errors import Count, Range, Rate, Share, Injected

if TYPE_CHECKING:
    from nowhere import Ghost

Size = int | tuple[int, int]


class Base:
    def __init__(self, *, dim: int, depth: int = 2, dropout: float = 0.0) -> None:
        self.dim, self.depth, self.dropout = dim, depth, dropout


class ViT(Base):
    """Inherits its constructor."""


class Other:
    def __init__(self) -> None: ...

    def __call__(self) -> int:
        return 1


class Likeness(Protocol):
    dim: int


class Model:
    def __init__(
        self,
        *,
        vocab_size: int,
        encoder: Base | None = None,
        like: Likeness | None = None,
        size: Size = 8,
        window: tuple[int, int] = (1, 2),
        sizes: tuple[int, ...] = (),
        mode: Literal["max", "min"] = "max",
        ghost: Ghost | None = None,
        root: Path | None = None,
        where: str | Path = "",
        names: list[str] = [],
        weights: Mapping[str, float] = {},
        parts: Iterable[Base] = (),
        make: Callable[[], Any] | None = None,
        flag: bool = False,
        limit: float | None = None,
        late: int = None,
        anything=None,
    ) -> None:
        self.given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}


class Picky:
    def __init__(self, *, heads: int) -> None:
        raise ValueError(f"{heads} heads do not divide the width\\nmore")


class Lost:
    def __init__(self, *, root: str) -> None:
        open(root)


class Limited:
    def __init__(
        self,
        *,
        vocab_size: Injected[int],
        share: Share = 0.5,
        count: Count | None = 1,
        rates: tuple[Rate, ...] = (),
        epochs: Annotated[int, Range(1, also=-1)] = 1,
    ) -> None: ...


class BlockOptions(TypedDict, total=False):
    heads: Required[Count]
    rate: Rate
    window: tuple[int, int] | None
    kind: Literal["max", "min"]


class Stack:
    def __init__(self, *, dim: int, **block: Unpack[BlockOptions]) -> None:
        self.block = block


class Loose:
    def __init__(self, *, dim: int, **rest: Any) -> None:
        self.rest = rest


def make_base(*, dim: int) -> Base:
    return Base(dim=dim)
'''


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def conf(tmp_path_factory):
    return write(tmp_path_factory.mktemp("conf"), FILES)


@pytest.fixture
def only_a_seed(tmp_path, monkeypatch):
    """A config of one key, for what does not depend on it: composing takes Hydra a while."""
    folder = write(tmp_path / "seed", {"config.yaml": "seed: 0"})
    monkeypatch.setattr(compose, "conf_dir", lambda: folder)
    monkeypatch.setattr(command, "conf_dir", lambda: folder)


@pytest.fixture(autouse=True)
def _in_a_room_of_its_own(conf, tmp_path, monkeypatch):
    monkeypatch.setattr(compose, "conf_dir", lambda: conf)
    monkeypatch.setattr(command, "conf_dir", lambda: conf)
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("VLM_DEBUG", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)  # --info speaks through the root logger


@pytest.fixture(name="write")
def _write():
    return write


@pytest.fixture
def collect():
    """Gives the status of `run` and the configs that it hands to main."""

    def collect(*argv, status=None):
        seen = []

        def main(given):
            seen.append(given)
            return status

        return command.run(main, list(argv)), seen

    return collect


@pytest.fixture
def refused(capsys):
    """Gives what `run` prints of a command line that it must refuse without calling main."""

    def refused(*argv, check=None):
        status = command.run(lambda given: pytest.fail("main was called"), list(argv), check)
        said = capsys.readouterr()
        assert status == 2
        assert said.err.startswith("error: ")
        assert "Traceback" not in said.err
        assert os.listdir() == []
        return said.err.removeprefix("error: ").strip().replace("\n  ", "\n")

    return refused


@pytest.fixture
def fault():
    """Gives what composing with these overrides is refused with."""

    def fault(*overrides):
        with pytest.raises(UserError) as caught:
            compose.compose(list(overrides))
        assert caught.value.status == 2
        return str(caught.value)

    return fault


@pytest.fixture
def python():
    """Runs a script in a process of its own, on the same folder of configs."""

    def python(script, also=""):
        start = "import sys\nfrom pathlib import Path\nfrom vlm.config import command, compose\n"
        start += f"command.conf_dir = compose.conf_dir = lambda: Path({str(compose.conf_dir())!r})\n"
        package = Path(compose.__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{also}"}
        command = [sys.executable, "-c", start + textwrap.dedent(script)]
        return subprocess.run(command, capture_output=True, text=True, env=environment)

    return python


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    """A package whose classes may be built, and which no other test can import."""
    root = tmp_path_factory.mktemp("packages")
    package = root / "strangers"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "parts.py").write_text(PARTS)
    quiet = "class Quiet:\n    def __init__(self, *, a: int) -> None: ...\n"
    (package / "explosive.py").write_text(f"{quiet}\n1 / 0\n")
    (package / "needy.py").write_text(f"import not_installed_anywhere\n{quiet}")
    sys.path.insert(0, str(root))
    allowed = list(target._allowed)
    target.trust("strangers")
    yield
    target._allowed[:] = allowed
    sys.path.remove(str(root))
