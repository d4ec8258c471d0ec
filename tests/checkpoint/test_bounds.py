"""Sizes that a file only states are bounded before anything is built of them, whichever command reads it."""

import resource
import time
from pathlib import Path

import hostile_files as files
import pytest

from vlm.checkpoint.file import write
from vlm.checkpoint.stored import isolate_config
from vlm.cli.main import run as vlm
from vlm.training.run import evaluate, run  # noqa: F401  imported before the clock runs
from vlm.training.run.fit import main as train

STATED = [
    ("model.args.encoder.args.image_size", 96000),
    ("preprocess.image_size", 96000),
    ("preprocess.image_size", [64, 96000]),
    ("max_tokens", -1),
    ("model.args.decoder.args.depth", 10**7),
    ("model.args.decoder.args.max_len", -1),
    ("config.model.encoder.image_size", 96000),
    ("config.data.num_workers", 10**6),
    ("config.task.max_tokens", -1),
    ("config.model.decoder.depth", 10**7),
    ("config.model.decoder.max_len", -1),
    ("config.data.max_len", -1),
    ("config.trainer.devices", 10**6),
    ("decoding.beam", 10**6),
    ("decoding.results", 10**6),
    ("config.data.source.test_scenes", 10**12),
]
COMMANDS = {
    "caption": lambda path: vlm(["caption", __file__, "-c", path, "--device", "cpu"]),
    "evaluate": lambda path: vlm(["evaluate", "-c", path, "--device", "cpu"]),
    "info": lambda path: vlm(["info", "-c", path]),
    "resume": lambda path: train([f"resume={path}"]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("key", "value"), STATED)
def test_a_size_out_of_bounds_is_refused_in_a_line(key, value, command, tmp_path, capsys):
    checkpoint = files.good()
    *parents, name = key.split(".")
    node = checkpoint["vlm"]
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = value
    write(tmp_path / "x.ckpt", checkpoint)
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert COMMANDS[command](str(tmp_path / "x.ckpt")) == 2
    assert time.process_time() - started < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and f"{key}: {value} is out of bounds" in line


@pytest.mark.parametrize("arguments", [{}, {"download": True}])
def test_a_source_of_a_checkpoint_downloads_nothing(arguments, tmp_path):
    source = {"_target_": "vlm.data.sources.torchvision_sets.TorchvisionSet", "name": "MNIST", "root": "x", **arguments}
    assert isolate_config({"data": {"source": source}, "runs": "runs"}, tmp_path)["data"]["source"]["download"] is False


def test_a_checkpoint_puts_no_cache_but_beside_those_of_other_runs(tmp_path, monkeypatch):
    folder = tmp_path / "runs" / "name" / "time"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for runs in ("/", "/tmp", "..", "../..", "elsewhere", "runs"):
        assert isolate_config({"runs": runs, "data": {}}, folder)["runs"] == str(folder)
    Path("runs/cache").mkdir()
    assert isolate_config({"runs": "runs", "data": {}}, folder)["runs"] == "runs"
