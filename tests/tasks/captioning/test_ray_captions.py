"""`vlm caption SHARDS --out DIR --engine ray`: what one process writes, also where a worker is killed."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from sharded import write_tar
from tiny_checkpoints import ROOT

from vlm.cli.main import run

SAMPLE = ROOT / "data" / "sample"
IMAGES = sorted(SAMPLE.glob("*.png"))
OPTIONS = ["-c", str(SAMPLE / "captioner.ckpt"), "--device", "cpu", "--precision", "fp32", "--batch-size", "4"]


def test_what_ray_cannot_do_is_a_line(tmp_path, monkeypatch, capsys):
    tar = write_tar(tmp_path / "0.tar", {"a.png": IMAGES[0].read_bytes()})
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert run(["caption", str(tar), *OPTIONS, "--out", str(tmp_path / "out"), "--engine", "ray"]) == 2
    assert "Ray distributes the shards itself" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(["caption", str(tar), *OPTIONS, "--out", str(tmp_path / "out"), "--engine", "ray"]) == 2
    assert capsys.readouterr().err == 'error: --engine ray: needs the package ray; pip install "vlm-lightning[ray]"\n'


@pytest.fixture
def start(tmp_path):
    """Starts the command on the shards of a folder; what is left at the end is ended."""
    processes = []

    def start_command(out: str, *options: str) -> subprocess.Popen:
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "vlm", "caption", "{00..19}.tar", *OPTIONS, "--out", out, *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=env, text=True, **pipes))
        return processes[-1]

    yield start_command
    for process in processes:
        process.kill()
        process.communicate()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def descendants(pid: int) -> dict[int, str]:
    """The processes below one, with the title of each."""
    parents, titles = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            titles[int(entry.name)] = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
    below = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {child: titles[child] for child in below - {pid} if child in titles}


def begin_and_find(process: subprocess.Popen, out: Path, *, count: int) -> dict[int, str]:
    """The processes of a command, once it has written some files and a worker is at another."""
    while True:
        assert process.poll() is None, process.communicate()
        below = descendants(process.pid)
        if len(list(out.glob("*.jsonl"))) >= count and any("ray::_caption" in title for title in below.values()):
            return below
        time.sleep(0.05)


def wait_until_ended(pids: set[int]) -> bool:
    until = time.monotonic() + 120  # agents of Ray notice a killed command late
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir() or (os.cpu_count() or 1) < 2, reason="needs Linux and two workers")
def test_a_killed_worker_loses_and_doubles_nothing(tmp_path, start):
    """20 shards on a cluster of this machine; then the command itself is ended, and goes on without Ray."""
    pytest.importorskip("ray")
    noise, members = random.Random(0), {}
    for number in range(400):
        file = io.BytesIO()
        Image.open(IMAGES[number % len(IMAGES)]).rotate(noise.random() * 360).save(file, "png")
        members[f"{number:06d}.png"] = file.getvalue()
    names = sorted(members)
    for number in range(20):
        write_tar(tmp_path / f"{number:02d}.tar", {name: members[name] for name in names[number::20]})
    calm, torn = start("calm"), start("torn", "--engine", "ray")
    below = begin_and_find(torn, tmp_path / "torn", count=3)
    os.kill(next(pid for pid, title in below.items() if "ray::_caption" in title), signal.SIGKILL)
    assert calm.wait(300) == 0, calm.communicate()
    said, errors = torn.communicate(timeout=300)
    assert torn.returncode == 0, errors
    lines = [line for line in said.splitlines() if line.endswith(" captions")]  # Ray tells of the worker between them
    shown = sorted(Path(line.partition("\t")[0]).name for line in lines)
    truth, written = files(tmp_path / "calm"), files(tmp_path / "torn")
    assert written == truth and [*shown, "settings.json"] == sorted(written) and len(shown) == 20
    records = [json.loads(line) for name in shown for line in written[name].splitlines()]
    assert sorted(record["image"].rpartition("/")[2] for record in records) == names
    assert wait_until_ended({*below})

    ended = start("ended", "--engine", "ray")
    below = begin_and_find(ended, tmp_path / "ended", count=2)
    ended.terminate()
    ended.communicate(timeout=60)
    assert ended.returncode in (143, -signal.SIGTERM) and wait_until_ended({*below})
    assert start("ended").wait(300) == 0 and files(tmp_path / "ended") == truth
