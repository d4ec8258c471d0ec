"""`vlm caption` with each option, on a small model that was never trained."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from vlm.cli.main import run
from vlm.decoding.options import Decoding
from vlm.inference.options import build_word_rules
from vlm.inference.writing import decode_likeliest
from vlm.nn.device import has_bfloat16
from vlm.tasks.captioning.predict import Captioner
from vlm.training.run.fit import main

SCENES = "data/sample"
# With the stem, a model whose two steps leave captions that differ.
TINY = ["debug=fast", "trainer=cpu", "optim=adamw", "model/encoder=vit_conv", "data.num_workers=0"]
TINY += ["model.size.dim=32", "model.size.num_heads=2", "model.size.encoder_depth=1", "model.size.decoder_depth=1"]
TINY += [f"data.source.{split}_scenes={count}" for split, count in (("train", 48), ("val", 8), ("test", 8))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert main([*TINY, f"runs={folder}"]) == 0
    return str(next(folder.rglob("last.ckpt")))


@pytest.fixture
def caption(checkpoint, tmp_path):
    def caption(*options, form="jsonl", images=SCENES, out="out"):
        path = tmp_path / out
        assert run(["caption", images, "-c", checkpoint, "--format", form, "--out", str(path), *options]) == 0
        text = path.read_text()
        return [json.loads(line) for line in text.splitlines()] if form == "jsonl" else text

    return caption


computes_in_bfloat16 = pytest.mark.skipif(not has_bfloat16("cpu"), reason="this CPU only emulates bfloat16")


SEARCHES = [
    ["--beam", "3", "--length-penalty", "0.5"],
    ["--beam", "4", "--groups", "2", "--results", "2"],
    ["--sample", "--temperature", "1.3", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--seed", "4"],
    ["--sample", "--results", "3"],
    ["--no-repeat-ngram", "2", "--repetition-penalty", "1.2", "--min-tokens", "3", "--max-tokens", "9"],
]


@pytest.mark.parametrize("options", SEARCHES)
@pytest.mark.sample(slow=5)
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=computes_in_bfloat16)])
def test_captions_do_not_depend_on_the_batch_size(caption, options, precision):
    one, many = (caption(*options, "--precision", precision, "--batch-size", size) for size in ("1", "32"))
    for row, other in zip(one, many, strict=True):
        assert (row["image"], row["caption"]) == (other["image"], other["caption"])
        assert row["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert 0 < row["confidence"] <= 1


@pytest.mark.slow
def test_bfloat16_says_almost_the_same(caption):
    """At the first word: a near tie that tips sends all after it another way."""
    exact, low = (caption("--precision", precision, "--max-tokens", "1") for precision in ("fp32", "bf16"))
    for row, other in zip(exact, low, strict=True):
        assert row["logprob"] != other["logprob"]
        assert row["confidence"] == pytest.approx(other["confidence"], rel=0.03)


def test_autocast_does_not_reach_decoding(checkpoint):
    captioner = Captioner(checkpoint)
    pixels = [captioner.pixels(Image.effect_noise((32, 32), 80).convert("RGB"))]
    reading = captioner.model, captioner.tokenizer, captioner.encode(pixels), Decoding(max_tokens=20)
    plain = decode_likeliest(*reading)
    with torch.autocast("cpu", torch.bfloat16):
        assert decode_likeliest(*reading) == plain


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize("options", [["--beam", "2"], ["--sample", "--results", "2"]])
def test_captions_depend_on_neither_workers_nor_order(caption, options, tmp_path, monkeypatch):
    alone = caption(*options, "--workers", "0")
    assert caption(*options, "--workers", "2") == alone
    names = list(dict.fromkeys(row["image"] for row in alone))
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*reversed(names), ""])))
    turned = caption(*options, "--workers", "3", "--batch-size", "2", images="-")
    assert [row["image"] for row in turned[::-1]] == [row["image"] for row in alone]
    pairs, others = ([(row["image"], row["caption"]) for row in rows] for rows in (turned, alone))
    assert sorted(pairs) == sorted(others)


@pytest.mark.slow
def test_attention_is_drawn_a_picture_a_caption(caption, tmp_path):
    folder = tmp_path / "maps"
    rows = caption("--beam", "2", "--results", "2", "--attention", str(folder))
    assert sorted(row["attention"] for row in rows) == sorted(str(path) for path in folder.iterdir())
    for row in rows:
        with Image.open(row["attention"]) as picture:
            assert picture.format == "PNG" and picture.width > 500
    bare = [{name: value for name, value in row.items() if name != "attention"} for row in rows]
    assert bare == caption("--beam", "2", "--results", "2")


@pytest.mark.slow
def test_attention_goes_on_where_a_killed_run_stopped(caption, tmp_path):
    folder, form = tmp_path / "maps", "csv"
    whole = caption("--attention", str(folder), form=form)
    drawn = sorted(folder.iterdir())
    lines = whole.splitlines(keepends=True)
    assert lines[0].rstrip() == "image,caption,logprob,confidence,attention"
    (tmp_path / "part").write_text("".join(lines[:3]) + lines[3][:9])
    for path in drawn:  # those of what is done are not drawn again
        path.unlink()
    assert caption("--attention", str(folder), "--continue", form=form, out="part").count("\n") == len(lines)
    assert len(list(folder.iterdir())) == len(drawn) - 2


@pytest.mark.slow
def test_words_are_begun_with_banned_and_required(caption):
    assert all(row["caption"].startswith("a red") for row in caption("--prefix", "a red"))
    assert all(" blue" in row["caption"] for row in caption("--beam", "3", "--require", "blue"))
    assert not any('"' in row["caption"] for row in caption("--ban", '"'))


def test_a_word_is_banned_in_all_its_forms(checkpoint):
    captioner = Captioner(checkpoint)
    encode = captioner.tokenizer.encode
    banned = build_word_rules(captioner.tokenizer, ban=["red"]).banned
    assert build_word_rules(captioner.tokenizer, ban=["Red"]).banned == banned
    names = build_word_rules(captioner.tokenizer, ban=["iPod"]).banned
    for found, forms in ((banned, ("red", " red", "Red", " Red")), (names, ("iPod", " iPod", "IPod", " IPod"))):
        assert set(found) == {tuple(encode(form)) for form in forms}


@pytest.mark.slow
def test_results_are_ranked_and_the_tree_is_written(caption, tmp_path):
    trace = tmp_path / "trace.json"
    rows = caption("--beam", "3", "--results", "2", "--trace", str(trace))
    assert [row["rank"] for row in rows] == [1, 2] * (len(rows) // 2)
    trees = json.loads(trace.read_text())
    assert set(trees) == {row["image"] for row in rows}
    assert all(tree["nodes"] for tree in trees.values())


@pytest.mark.sample(slow=5)
@pytest.mark.parametrize("form", ["text", "jsonl", "csv"])
@pytest.mark.parametrize("results", [1, 2])
def test_continue_skips_what_is_whole_and_mends_the_end(caption, checkpoint, tmp_path, form, results):
    options = ["--beam", "2", "--results", str(results)]
    caption(*options, form=form)
    whole = (tmp_path / "out").read_bytes()
    (tmp_path / "part").write_bytes(whole[: len(whole) // 2])
    caption(*options, "--continue", form=form, out="part")
    mended = (tmp_path / "part").read_bytes()
    # What is decoded beside an image moves the last digits of its score, and nothing else.
    texts, scores = without_scores(mended)
    assert texts == without_scores(whole)[0]
    assert scores == pytest.approx(without_scores(whole)[1], abs=1e-5)
    caption(*options, "--continue", form=form, out="part")
    assert (tmp_path / "part").read_bytes() == mended


@pytest.mark.slow
def test_continue_refuses_a_file_of_another_number_of_results(caption, tmp_path, capsys):
    for made, asked in ((1, 2), (2, 1)):
        caption("--beam", "2", "--results", str(made), form="text")
        whole = (tmp_path / "out").read_bytes()
        with pytest.raises(AssertionError):  # the fixture's, of the exit status
            caption("--beam", "2", "--results", str(asked), "--continue", form="text")
        assert "was not written by this command" in capsys.readouterr().err
        assert (tmp_path / "out").read_bytes() == whole


@pytest.mark.slow
def test_continue_leaves_an_image_alone_that_had_fewer_texts_than_asked_for(caption, tmp_path):
    options = ["--beam", "3", "--results", "3"]
    caption(*options, form="csv")
    head, *rows = (tmp_path / "out").read_text().splitlines(keepends=True)
    fewer = "".join([head, rows[0], *rows[3:]])
    (tmp_path / "out").write_text(fewer)
    caption(*options, "--continue", form="csv")
    assert (tmp_path / "out").read_text() == fewer


def without_scores(content: bytes) -> tuple[list[str], list[float]]:
    parts = re.split(r"(-?\d+\.\d+(?:e-?\d+)?)", content.decode())
    return parts[::2], [float(score) for score in parts[1::2]]


@pytest.mark.slow
def test_a_page_of_captions_links_to_the_pictures(caption, tmp_path):
    text = caption("--beam", "2", "--results", "2", "--attention", str(tmp_path / "the maps"), form="html")
    assert text.count('href="the%20maps/test-0-') == len(list((tmp_path / "the maps").iterdir()))
    assert text.count("<figure") == len(caption())
    assert "data:image/" in text and "http" not in text


@pytest.mark.parametrize(
    "options, named",
    [
        (["--continue"], "--continue"),
        (["--precision", "int4"], "error: --precision: 'int4' is unknown; choose auto, fp32, bf16 or int8; did you "),
        (["--trace", "x"], "--trace"),
        (["--format", "html"], "--format html"),
        (["--sample", "--beam", "2"], "--sample"),
        (["--results", "2"], "--results"),
        (["--attention", "/dev/null/maps"], "--attention /dev/null/maps"),
    ],
)
def test_wrong_use_is_told(checkpoint, options, named, capsys):
    assert run(["caption", SCENES, "-c", checkpoint, *options]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    Image.effect_noise((32, 32), 80).convert("RGB").save(path)
    return path


@pytest.mark.slow
def test_no_file_that_is_read_is_written_over(checkpoint, image, tmp_path, capsys):
    copy = tmp_path / "copy.ckpt"
    copy.write_bytes(Path(checkpoint).read_bytes())
    for option in ("--out", "--trace"):
        for path in (image, copy):
            before = path.read_bytes()
            assert run(["caption", str(image), "-c", str(copy), "--beam", "2", option, str(path)]) == 2
            assert f"error: {option} {path}: is also an input" in capsys.readouterr().err
            assert path.read_bytes() == before


@pytest.mark.parametrize("options", [["-c", "none.ckpt"], ["--device", "tpu"], ["--top-k", "-2"], ["--format", "x"]])
def test_a_command_that_fails_leaves_yesterdays_result(checkpoint, image, tmp_path, options, capsys):
    out = tmp_path / "captions.txt"
    out.write_text("yesterday")
    assert run(["caption", str(image), "-c", checkpoint, "--out", str(out), *options]) == 2
    assert out.read_text() == "yesterday" and not list(tmp_path.glob("*.part"))


# With names that are arguments, with those of stdin, and with one that is not there.
THREE_COMMANDS = """
import sys
from vlm.cli.main import main

gone, *rest = sys.argv[1:]
names, options = rest[:3], rest[3:]
for inputs, status in ((names, 1), (["-"], 0), ([gone], 2)):
    sys.argv[1:] = [*options, *inputs]
    try:
        main()
    except SystemExit as end:
        assert end.code == status, end.code
"""


@pytest.mark.slow
def test_names_that_are_no_utf8_or_hold_a_newline(checkpoint, tmp_path):
    """In a process of its own: what stdin and stdout do with names is theirs."""
    odd = [os.fsencode(tmp_path) + name for name in (b"/\xff\xfe.png", b"/new\nerror: x.png", b"/\xffbad.png")]
    for path in odd[:2]:
        Image.effect_noise((32, 32), 80).convert("RGB").save(os.fsdecode(path))
    Path(os.fsdecode(odd[2])).write_bytes(b"no image")
    options = ["caption", "-c", checkpoint, "--device", "cpu", "--format", "jsonl"]
    command = [sys.executable, "-c", THREE_COMMANDS, b"/\xff\nerror: forged*.png", *odd, *options]
    done = subprocess.run(command, input=odd[0] + b"\n", capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [os.fsencode(json.loads(line)["image"]) for line in done.stdout.splitlines()] == [*odd[:2], odd[0]]
    error, gone = [line for line in done.stderr.decode().splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: {tmp_path}/\\udcffbad.png: damaged")
    assert gone == "error: /\\udcff"  # its second line is no error
