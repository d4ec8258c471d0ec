"""The wheel and the sdist: built from the checkout, installed outside it, used in an empty folder."""

import json
import os
import subprocess
import sys
import tarfile
import tomllib
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from serving_commands import listening
from tiny_checkpoints import IMAGES

import vlm

ROOT = Path(__file__).parents[1]
QUICK = ["debug=fast", "trainer=cpu", "model.size.dim=32", "model.size.num_heads=2", "name=wheel"]
QUICK += [f"data.source.{split}_scenes={count}" for split, count in (("train", 16), ("val", 8), ("test", 8))]
PIP = ["pip", "--disable-pip-version-check", "--no-cache-dir"]


def run(*command: str, cwd: Path, path: Path | None = None) -> str:
    """What a module of Python prints, with a folder of packages before all others."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_version_stands_everywhere_alike() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == vlm.__version__
    assert f"\n## {vlm.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {vlm.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_oldest_versions_are_those_that_are_allowed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [Requirement(line) for line in (*project["dependencies"], *project["optional-dependencies"]["test"])]
    least = {one.name: next(part.version for part in one.specifier if part.operator == ">=") for one in needed}
    lines = [line for line in (ROOT / "constraints-oldest.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = dict(line.split("==") for line in lines)
    pinned, least = ({name: Version(text) for name, text in one.items()} for one in (pinned, least))
    assert pinned == least


def _serve_and_show(place: Path, empty: Path) -> None:
    """Asks what the extras of this environment serve: the service for the caption of an image, the page for itself."""
    image, captioner = IMAGES[0], str(ROOT / "data" / "sample" / "captioner.ckpt")
    if find_spec("fastapi"):
        line = run("vlm", "caption", image, "-c", captioner, "--device", "cpu", cwd=empty, path=place)
        with listening("serve", "-c", captioner, package=place, cwd=empty) as (_, port):
            answer = json.loads(send_request(port, "POST", "/predict", Path(image).read_bytes()))
        assert line == f"{image}\t{answer['results'][0]['text']}\n"
    if find_spec("gradio"):
        with listening("demo", "-c", "last", package=place, cwd=empty) as (_, port):
            assert '"title":"vlm: captioning"' in send_request(port, "GET", "/")


def send_request(port: int, method: str, path: str, body: bytes | None = None) -> str:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, {"Content-Type": "image/png"} if body else {})
    answer = connection.getresponse()
    content = answer.read().decode()
    assert answer.status == 200, content
    return content


@pytest.mark.slow
def test_wheel_and_sdist_work_outside_the_checkout(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    built, unpacked, empty = (tmp_path / name for name in ("built", "unpacked", "empty"))
    for folder in (built, empty):
        folder.mkdir()
    run("hatchling", "build", "--target", "sdist", "--directory", str(built), cwd=ROOT)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    # The wheel of the sdist: what either lacks, the installed package lacks.
    run(*PIP, "wheel", str(source), "--no-deps", "--no-build-isolation", "-w", str(built), cwd=empty)
    (wheel,) = built.glob("*.whl")
    place = tmp_path / "site"
    run(*PIP, "install", str(wheel), "--no-deps", "--no-index", "--target", str(place), cwd=empty)
    assert str(place / "vlm" / "conf") in run("vlm", "train", "--info", "searchpath", cwd=empty, path=place)
    run("vlm", "train", *QUICK, cwd=empty, path=place)
    (image,) = empty.glob("runs/wheel/*/samples/example.png")
    line = run("vlm", "caption", str(image), "-c", "last", "--device", "cpu", cwd=empty, path=place)
    assert line.startswith(f"{image}\t")
    _serve_and_show(place, empty)
    assert f"vlm {vlm.__version__}" in run("vlm", "--version", cwd=empty, path=place)
