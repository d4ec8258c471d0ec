"""Lines that install: each names this project, whose name on the package index is not that of its package."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PLACES = ("*.md", "*.toml", "*.txt", "*.py", ".ci/*", ".github/**/*.yml", "conf/**/*.yaml", "data/*.md", "docs/**/*.md")
PLACES += ("vlm/**/*.py", "benchmarks/**/*.py", "tests/**/*.py")
FILES = [path for place in PLACES for path in ROOT.glob(place) if path != Path(__file__)]

# `vlm` as something to install: with an extra anywhere, or after a command that installs.
EXTRA = r"(?<![\w.-])vlm\[[a-z]"
COMMAND = r"\b(?:pipx?|uv)(?:[ \t]+[\w-]+)?[ \t]+(?:install|add|download)"
STRANGER = re.compile(rf"""{EXTRA}|{COMMAND}(?:[ \t]+[^\s`&;|]+)*?[ \t]+["'\\]*vlm(?![\w.-])""")


STRANGERS = ["pip install vlm", "`python -m pip install -U vlm`", 'pip install -c constraints.txt "vlm==0.1.0"']
STRANGERS += ["says 'needs pip install \"vlm[coco]\" and Java'", 'dev = ["vlm[test]"]', "pipx install vlm"]
STRANGERS += ["uv pip install vlm", "uv add vlm"]
OTHERS = ['pip install -e ".[test]"', "pip install -e . && vlm info", "pip install vlm-x"]


def test_the_stranger_is_known_when_seen():
    assert [line for line in [*STRANGERS, *OTHERS] if STRANGER.search(line)] == STRANGERS


@pytest.mark.slow
def test_nothing_installs_the_stranger():
    """Messages, configs, documents and packaging alike: `vlm` on the package index is another project."""
    assert {"README.md", "pyproject.toml", "score.py", "storage.py", "tensorboard.yaml"} <= {
        path.name for path in FILES
    }
    lines = ((path, line) for path in FILES for line in path.read_text(encoding="utf-8").splitlines())
    assert [f"{path.relative_to(ROOT)}: {line}" for path, line in lines if STRANGER.search(line)] == []
    assert PROJECT["name"] != "vlm"


def test_extras_are_those_there_are():
    text = "\n".join(path.read_text(encoding="utf-8") for path in FILES)
    named = re.findall(rf'"(?:\.|{re.escape(PROJECT["name"])})\[([a-z]+)\]"', text)
    assert {"coco", "shards", "tensorboard", "test"} <= {*named} <= {*PROJECT["optional-dependencies"]}


def test_package_and_command_stay():
    assert PROJECT["scripts"] == {"vlm": "vlm.cli.main:main"}
