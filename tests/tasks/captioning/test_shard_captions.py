"""`vlm caption SHARDS --out DIR`: a file a shard, whole or not at all, shared by ranks, gone on with after a kill."""

import io
import json
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from PIL import Image
from sharded import write_tar
from tiny_checkpoints import ROOT

from vlm.cli.main import run
from vlm.data.store import storage

SAMPLE = ROOT / "data" / "sample"
CAPTIONER = str(SAMPLE / "captioner.ckpt")
IMAGES = sorted(SAMPLE.glob("*.png"))
OPTIONS = ["-c", CAPTIONER, "--device", "cpu", "--precision", "fp32"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """The sample's images in three shards; one is damaged, and another member is no image."""
    for number in range(3):
        members = {path.name: path.read_bytes() for path in IMAGES[number::3]}
        if number == 1:
            members |= {"broken.png": b"\x89PNG damaged", "broken.txt": "a caption of it", "notes.md": "none"}
        write_tar(tmp_path / "shards" / f"{number:04d}.tar", members)
    return tmp_path / "shards"


def caption(pattern: Path | str, out: Path | str, *options: str) -> int:
    return run(["caption", str(pattern), *OPTIONS, "--out", str(out), *options])


def read_files(out: Path) -> dict[str, bytes]:
    """The files of a folder of captions."""
    return {path.name: path.read_bytes() for path in out.iterdir() if path.name != "settings.json"}


def records(files: dict[str, bytes]) -> list[dict]:
    return [json.loads(line) for content in files.values() for line in content.splitlines()]


def as_ranks(monkeypatch, kind: tuple[str, str], world: int) -> Iterator[int]:
    for rank in range(world):
        for name, value in zip(kind, (rank, world), strict=True):
            monkeypatch.setenv(name, str(value))
        yield rank


@pytest.mark.slow
def test_captions_are_those_of_the_files(shards, tmp_path, capsys):
    assert run(["caption", str(SAMPLE), *OPTIONS, "--format", "jsonl"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    truth = {Path(line["image"]).name: line for line in lines}
    assert caption(shards / "{0000..0002}.tar", tmp_path / "out") == 1  # for one image
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {shards}/0001.tar/broken.png: ") and len(shown.err.splitlines()) == 1
    assert shown.out.splitlines()[0].startswith(f"{tmp_path}/out/0000.jsonl\t")
    files = read_files(tmp_path / "out")
    assert len(records(files)) == len(truth) == len(IMAGES)
    for record in records(files):
        tar, _, member = record["image"].partition("/")
        assert member in {path.name for path in IMAGES[int(tar.removesuffix(".tar")) :: 3]}
        assert record["caption"] == truth[member]["caption"] and list(record) == list(truth[member])
        assert record["logprob"] == pytest.approx(truth[member]["logprob"], abs=1e-4)


@pytest.mark.slow
def test_shards_that_are_done_are_left_as_they_are(shards, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".0002.jsonl.abcdefgh.tmp").write_text("half a li")  # of a process that was killed
    (out / ".0007.jsonl.abcdefgh.tmp").write_text("another process writes it")
    assert caption(shards / "0002.tar", out) == 0
    assert sorted(read_files(out)) == [".0007.jsonl.abcdefgh.tmp", "0002.jsonl"]
    (out / "0000.jsonl").write_text("mine\n")
    before = (out / "0002.jsonl").stat().st_mtime_ns
    assert caption(shards / "*.tar", out) == 1
    assert (out / "0002.jsonl").stat().st_mtime_ns == before and (out / "0000.jsonl").read_text() == "mine\n"
    assert capsys.readouterr().out.count("0001.jsonl") == 1
    assert caption(shards / "*.tar", out, "--beam", "2") == 2
    assert "holds captions of another model or of other options" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")])
def test_ranks_share_the_shards(shards, tmp_path, kind, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.delenv("SLURM_JOB_NAME", raising=False)
    expected = [["0000.jsonl", "0002.jsonl"], ["0001.jsonl"]]
    for rank in as_ranks(monkeypatch, kind, 2):
        assert caption(shards / "{0000..0002}.tar", tmp_path / "out") == 0  # 1 would have torchrun end the others
        names = [Path(line.partition("\t")[0]).name for line in capsys.readouterr().out.splitlines()]
        assert names == expected[rank]
    assert len(records(read_files(tmp_path / "out"))) == len(IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--beam", "2", "--results", "2"]], ids=["one", "several"])
def test_parquet_holds_the_same_in_typed_columns(shards, tmp_path, options):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_tar(shards / "0003.tar", {"notes.md": "no image"})
    for form in ("jsonl", "parquet"):
        assert caption(shards / "{0000..0003}.tar", tmp_path / "out", "--format", form, *options) == 1
    types = {"image": "string", "caption": "string", "logprob": "double", "confidence": "double"}
    types |= {"rank": "int32"} if options else {}
    for number in range(4):
        table = parquet.read_table(tmp_path / "out" / f"{number:04d}.parquet")
        assert {field.name: str(field.type) for field in table.schema} == types
        lines = (tmp_path / "out" / f"{number:04d}.jsonl").read_text().splitlines()
        assert table.to_pylist() == [json.loads(line) for line in lines] and (number == 3) == (not lines)


def test_parquet_without_pyarrow_is_a_line(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert caption(shards / "0000.tar", tmp_path / "out", "--format", "parquet") == 2
    line = 'error: --format parquet: needs the package pyarrow; pip install "vlm-lightning[parquet]"\n'
    assert capsys.readouterr().err == line and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_store_is_read_and_written(shards, tmp_path, capsys):
    fs = fsspec.filesystem("memory")
    for path in shards.iterdir():
        fs.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    try:
        assert caption("memory://bucket/{0000..0002}.tar", "memory://bucket/captions") == 1
        assert caption(shards / "*.tar", tmp_path / "out") == 1
        stored = {name: fs.cat_file(f"/bucket/captions/{name}") for name in read_files(tmp_path / "out")}
        assert stored == read_files(tmp_path / "out")
        capsys.readouterr()
        assert caption("memory://bucket/*.tar", "memory://bucket/captions") == 0
        assert capsys.readouterr().out == ""  # all are done
    finally:
        fs.rm("/bucket", recursive=True)


def test_a_shard_whose_bytes_do_not_come_leaves_no_file(shards, tmp_path, monkeypatch, capsys):
    """A store that fails for a while would else leave files with gaps, which count as done."""
    real = storage.read_span

    def failing(path, span):
        if "0001" in path:
            raise OSError("the connection was reset")
        return real(path, span)

    monkeypatch.setattr(storage, "read_span", failing)
    (shards / "0002.tar").write_bytes(b"no tar")
    assert caption(shards / "000{0..3}.tar", tmp_path / "out") == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and "the connection was reset" in lines[0]
    assert "cannot be read as a tar" in lines[1] and "0003.tar: cannot be read" in lines[2]
    assert list(read_files(tmp_path / "out")) == ["0000.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["0000.tar"], "give --out DIR"),
        (["0000.tar", "--out", "out", "--format", "csv"], "choose jsonl or parquet"),
        (["0000.tar", "photo.png", "--out", "out"], "photo.png: is not a .tar"),
        (["0000.tar", "copy/0000.tar", "--out", "out"], "would share 0000.jsonl"),
        (["*.gone.tar", "--out", "out"], "there is no such shard"),
        (["s4://bucket/0000.tar", "--out", "out"], "is not in a supported store"),
        (["0000.tar", "--out", "0001.tar"], "cannot be written"),
        (["0000.tar", "--out", "out", "--sidecar"], "--sidecar: cannot be combined with shards"),
        (["0000.tar", "--out", "out", "--engine", "spark"], "--engine spark: is unknown"),
        (["photo.png", "--engine", "ray"], "--engine: cannot be combined with images"),
        (["0000.tar", "--out", "out", "--continue"], "--continue: cannot be combined with shards"),
    ],
)
def test_faults_are_a_line(shards, arguments, line, monkeypatch, capsys):
    monkeypatch.chdir(shards)
    assert run(["caption", *arguments, *OPTIONS]) == 2
    shown = capsys.readouterr().err
    assert line in shown and len(shown.splitlines()) == 1 and not list(shards.glob("out/*.jsonl"))


def run_forked(rank: int, pattern: str, out: Path) -> None:
    """A process of two, in a fork, which starts in no time."""
    torch.set_num_threads(1)  # those of the parent are not in a fork
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    os._exit(caption(pattern, out, "--batch-size", "4"))


@pytest.mark.slow
def test_kills_lose_and_double_nothing(tmp_path):
    """12 shards, two ranks, each killed at random moments until it comes to its end: as a run that nothing touched."""
    noise, members = random.Random(0), {}
    for number in range(72):
        file = io.BytesIO()
        Image.open(IMAGES[number % len(IMAGES)]).rotate(noise.random() * 360).save(file, "png")
        members[f"{number:06d}.png"] = file.getvalue()
    names = sorted(members)
    for number in range(12):
        write_tar(tmp_path / f"{number:02d}.tar", {name: members[name] for name in names[number::12]})
    pattern, fork, kills = f"{tmp_path}/{{00..11}}.tar", multiprocessing.get_context("fork"), 0
    for out, most in ((tmp_path / "calm", 400), (tmp_path / "torn", 2)):  # shards that a process lives for
        for rank in (0, 1):
            status = None
            while status != 0:
                process = fork.Process(target=run_forked, args=(rank, pattern, out))
                process.start()
                goal = len(list(out.glob("*.jsonl"))) + noise.randint(most // 4, most)
                while process.is_alive() and len(list(out.glob("*.jsonl"))) < goal:
                    process.join(0.002)
                process.join(noise.uniform(0, 0.01))  # a shard takes a little longer
                process.kill()
                process.join()
                status = process.exitcode
                assert status in (0, -signal.SIGKILL)
                kills += status != 0
    assert kills >= 6
    assert read_files(tmp_path / "torn") == read_files(tmp_path / "calm") and len(read_files(tmp_path / "calm")) == 12
    assert sorted(record["image"].rpartition("/")[2] for record in records(read_files(tmp_path / "torn"))) == names
