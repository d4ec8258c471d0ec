"""Random mutations of checkpoints, tables and overrides: each is used, or refused in a line, soon, in little memory."""

import csv
import io
import json
import random
import resource
import shutil
import time
from pathlib import Path

import pytest
import torch
from mutations import VALUES, change
from small import command

import vlm.cli.check_data
import vlm.training.run.run
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.config.tree import walk
from vlm.training.config.check import check
from vlm.training.run.fit import main

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "data" / "sample"
SECONDS, MEGABYTES = 5, 1000


def counts(sample, full):
    """How many mutations are tried: a sample of them in the slow tests, all of them nightly."""
    values = [pytest.param(sample, marks=pytest.mark.slow), pytest.param(full, marks=pytest.mark.nightly)]
    return pytest.mark.parametrize("count", values)


def try_command(function, argv, what, capfd):
    """The exit status, after checking that the command ended soon, in little memory, and with at most one error."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        status = function(argv)
    except BaseException as fault:
        pytest.fail(f"{what}: {fault!r}")
    seconds = time.process_time() - started
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    output = capfd.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert status in (0, 1, 2), what
    assert len(errors) == (status != 0) or "\nverdict     training" in output.out, (what, errors)
    assert seconds < SECONDS and grown < MEGABYTES, (what, seconds, grown)
    return status


def damage(content, dice):
    """The bytes cut, with some of them others, or with a part said twice."""
    content, kind = bytearray(content), dice.randrange(3)
    if kind == 0:
        return content[: dice.randrange(len(content))]
    if kind == 1:
        for _ in range(dice.choice([1, 5, 100])):
            content[dice.randrange(len(content))] = dice.randrange(256)
        return content
    start = dice.randrange(len(content))
    return content[:start] + content[dice.randrange(len(content)) :]


@counts(20, 150)
@pytest.mark.parametrize("kind", ["values", "bytes"])
def test_any_checkpoint_is_used_or_refused(kind, count, tmp_path, capfd):
    dice, statuses = random.Random(kind), []
    whole = (SAMPLE / "captioner.ckpt").read_bytes()
    for number in range(count):
        path = tmp_path / f"{number}.ckpt"
        if kind == "bytes":
            path.write_bytes(damage(whole, dice))
            what = f"bytes {number}"
        else:
            content = torch.load(io.BytesIO(whole), weights_only=True)
            what = change(content["vlm"] if dice.random() < 0.8 else content, dice)
            torch.save(content, path)
        argv = ["caption", str(SAMPLE / "test-0-000000.png"), "-c", str(path)]
        statuses.append(try_command(vlm, argv, what, capfd))
        path.unlink()
    assert {*statuses} == ({0, 2} if kind == "values" else {2})  # checksums stand for all bytes


def rows():
    """An image table of 20 rows."""
    return [{"image": f"{i % 6}.png", "caption": f"a red circle {i}", "split": "train"} for i in range(20)]


def write_table(kind):
    """The table as a file of this kind."""
    if kind == "csv":
        text = io.StringIO()
        table = csv.DictWriter(text, ["image", "caption", "split"])
        table.writeheader()
        table.writerows(rows())
        return text.getvalue().encode()
    if kind == "jsonl":
        return "\n".join(map(json.dumps, rows())).encode()
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow, file = pytest.importorskip("pyarrow"), io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows()), file)
    return file.getvalue()


@counts(8, 80)
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_any_table_is_read_or_refused(kind, count, tmp_path, capfd):
    dice, statuses = random.Random(kind), []
    for number in range(6):
        shutil.copy(SAMPLE / f"test-0-00000{number}.png", tmp_path / f"{number}.png")
    whole = write_table(kind)
    options = ["data=captions", f"data.root={tmp_path}", "data.image_size=32"]
    for number in range(count):
        path = tmp_path / f"table{number}.{kind}"
        if kind == "jsonl" and dice.random() < 0.5:
            content = rows()
            what = change(content, dice)
            path.write_text("\n".join(map(json.dumps, content)))
        else:
            path.write_bytes(damage(whole, dice))
            what = f"bytes {number}"
        statuses.append(try_command(vlm, ["check-data", *options, f"data.path={path}"], what, capfd))
        path.unlink()
    assert {1, 2} & {*statuses}


@counts(16, 70)
@pytest.mark.parametrize("task", ["captioning", "tagging", "image_questions"])
def test_any_override_is_taken_or_refused(task, count, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dice, statuses = random.Random(task), []
    usual = command(task, "trainer.max_steps=1", "test=false")
    values = {key: value for key, value in walk(compose(usual, check)) if key}
    for _ in range(count):
        key = dice.choice([*values])
        value = values[key] if dice.random() < 0.1 else dice.choice(VALUES)
        if key == "compile" and value:
            continue  # compiling takes longer than any other option
        override = f"{key}={'null' if value is None else json.dumps(value)}"
        statuses.append(try_command(main, [*usual, override], override, capfd))
    assert {0, 2} <= {*statuses}
