"""Odd and hostile image files, through the loader, through `vlm caption`, and through training."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import odd_images
import pytest
from odd_images import ARRAY, HEAVY, REFUSED, SAME, SHOWN

from vlm.cli import main as cli
from vlm.data.images.image import MAX_BYTES, ImageError, load_image
from vlm.training.run.fit import main

pytestmark = pytest.mark.filterwarnings("ignore:::PIL")  # pytest resets the filter that vlm.data.images.image sets

MEGABYTES = 800  # that no file takes more of
SECONDS = 30  # of a processor that may be slow
SMALL = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", "data.eval_batch_size=8"]
SMALL += [f"model.size.{name}" for name in ("dim=32", "num_heads=2", "encoder_depth=1", "decoder_depth=1")]


@pytest.mark.parametrize("name", SAME)
def test_a_file_of_equal_pixels_is_an_equal_image(name):
    loaded = load_image(SAME[name]())
    assert np.array_equal(np.asarray(loaded), ARRAY)
    assert (loaded.mode, loaded.info, dict(loaded.getexif())) == ("RGB", {}, {})


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_file_shows(name):
    make, shown = SHOWN[name]
    assert np.array_equal(np.asarray(load_image(make())), shown)


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_file_is_refused_in_a_line(name, tmp_path):
    make, said = REFUSED[name]
    path = tmp_path / "image.png"
    path.write_bytes(make())
    with pytest.raises(ImageError, match=said) as caught:
        load_image(path)
    assert str(caught.value).startswith(f"{path}: ") and caught.value.status == 1
    assert len(str(caught.value).splitlines()) == 1


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")  # opening it would wait for a writer for ever
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    said = {"pipe.png": "not a regular file", "loop.png": ".", "zero.png": "not a regular file", "sparse.png": "bytes"}
    said |= {"absent.png": "No such file", "": "is a folder", "nul\0byte.png": "null"}
    for name, reason in said.items():
        with pytest.raises(ImageError, match=reason):
            load_image(tmp_path / name)


# Each file in a process of its own, which knows what it has taken at most.
MEASURE = """
import json, os, resource, sys, time
sys.path.insert(0, sys.argv[1])
import odd_images
from vlm.data.images.image import ImageError, Preprocess, load_image

def measured(make):
    if not (maker := os.fork()):
        open("file", "wb").write(make())
        os._exit(0)
    os.waitpid(maker, 0)
    data = open("file", "rb").read()
    reader, writer = os.pipe()
    if not (child := os.fork()):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            Preprocess(image_size=224)(load_image(data))
            said = "read"
        except ImageError as fault:
            said = str(fault)
        used = resource.getrusage(resource.RUSAGE_SELF)
        result = [said, used.ru_utime + used.ru_stime, (used.ru_maxrss - before) / 1024]
        os.write(writer, json.dumps(result).encode())
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.close(writer)
    return json.loads(os.read(reader, 65536) or "null") if status == 0 else None

cases = odd_images.HEAVY | {name: made[0] for name, made in odd_images.REFUSED.items()}
print(json.dumps({name: measured(make) for name, make in cases.items()}))
"""


@pytest.mark.slow
def test_memory_and_time_are_bounded_for_every_file(tmp_path):
    folder = Path(odd_images.__file__).parent
    command = [sys.executable, "-c", MEASURE, str(folder)]
    environment = os.environ | {"PYTHONPATH": str(folder.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found.keys() == HEAVY.keys() | REFUSED.keys()
    assert [name for name in HEAVY if found[name] is None or found[name][0] != "read"] == []
    for name, (said, seconds, megabytes) in found.items():
        print(f"{name:30} {seconds:6.2f} s {megabytes:6.0f} MB")
        assert megabytes < MEGABYTES, name
        assert seconds < (SECONDS if said == "read" else 5), name


# Through training, and with what was trained.


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Every file that can be read, and every one that cannot, each with a caption; three of these in training."""
    folder = tmp_path_factory.mktemp("photos")
    rows = []
    for kind, files in (("same", SAME), ("refused", {name: made[0] for name, made in REFUSED.items()})):
        for number, (name, make) in enumerate(files.items()):
            path = folder / f"{kind}-{number}.jpg"  # what the name says counts for nothing
            path.write_bytes(make())
            split = "train" if kind == "same" or number < 3 else "val" if number < 6 else None
            rows += [{"image": path.name, "caption": f"a picture of {name}", "split": split}] if split else []
            if kind == "same" and number < 4:
                rows.append({"image": f"val-{number}.jpg", "caption": "a picture", "split": "val"})
                (folder / f"val-{number}.jpg").write_bytes(make())
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def command(photos, tmp_path_factory) -> list[str]:
    data = ["data=captions", f"data.root={photos}", "data.path=captions.jsonl", "data.image_size=32", "data.max_len=64"]
    return [*SMALL, *data, "tokenizer=bytes", "data.batch_size=8"]


@pytest.fixture(scope="module")
def trained(command, tmp_path_factory) -> Path:
    """A run of one epoch, three of whose samples cannot be read."""
    runs = tmp_path_factory.mktemp("runs")
    assert main([*command, f"runs={runs}", "trainer.max_epochs=1", "callbacks.bad_samples.limit=0.2"]) == 0
    return next(runs.glob("*/20*"))


@pytest.mark.slow
def test_equal_pixels_have_an_equal_caption_whatever_file_holds_them(trained, photos, tmp_path, capsys):
    checkpoint = str(trained / "checkpoints" / "last.ckpt")
    out = tmp_path / "captions.jsonl"
    options = ["-c", checkpoint, "--device", "cpu", "--format", "jsonl", "--out", str(out), "--batch-size", "1"]
    images = sorted(str(path) for path in photos.glob("same-*"))
    assert cli.run(["caption", *images, *options]) == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["image"] for record in told] == images
    assert len({record["caption"] for record in told}) == 1
    # Its last digits depend on where an image stands among those that are decoded together.
    logprobs = [record["logprob"] for record in told]
    assert np.allclose(logprobs, logprobs[0], rtol=1e-6, atol=0)
    assert not np.isclose(logprobs[0], 0)
    other = str(photos / "other.png")
    odd_images.TURNED.save(other)
    assert cli.run(["caption", other, *options]) == 0
    assert not np.isclose(json.loads(out.read_text())["logprob"], logprobs[0], rtol=1e-6, atol=0)


@pytest.mark.slow
def test_bad_samples_are_skipped_named_and_counted_and_the_count_survives_resume(trained, command, tmp_path, capsys):
    runs = tmp_path / "runs"
    assert main([*command, f"runs={runs}", "trainer.max_epochs=1", "callbacks.bad_samples.limit=0.2"]) == 0
    said = capsys.readouterr().out
    named = [line for line in said.splitlines() if line.startswith("skipped: ")]
    assert sorted(re.search(r"refused-(\d+)\.jpg", line)[1] for line in named) == ["0", "1", "2"]
    assert f"skipped 3 of {len(SAME) + 3} training samples" in said
    assert said.count("skipped in validation: ") >= 3
    (run,) = runs.glob("*/20*")
    assert main([f"resume={run}", "trainer.max_epochs=2"]) == 0
    said = capsys.readouterr().out
    assert "skipped: " not in said  # each is named once
    assert f"skipped 3 of {len(SAME) + 3} training samples" in said
    assert main([f"resume={run}", "trainer.max_epochs=3", "callbacks.bad_samples.limit=0.05"]) == 1
    assert f"3 of {len(SAME) + 3} training samples could not be read" in capsys.readouterr().err


LIMITS = [("0", "1"), pytest.param("0.05", "2", marks=pytest.mark.slow)]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "count"), LIMITS)
def test_too_many_bad_samples_stop_the_run_and_a_strict_setting_stops_at_the_first(
    limit, count, command, tmp_path, capsys
):
    options = [f"runs={tmp_path / 'runs'}", "trainer.max_epochs=1", f"callbacks.bad_samples.limit={limit}"]
    assert main([*command, *options, "data.batch_size=1", "trainer.num_sanity_val_steps=0"]) == 1
    said = capsys.readouterr()
    assert said.out.count("skipped: ") == int(count)
    assert f"{count} of {len(SAME) + 3} training samples" in said.err
    assert f"callbacks.bad_samples.limit={limit}" in said.err
    assert "refused-" in said.err and "Traceback" not in said.err
