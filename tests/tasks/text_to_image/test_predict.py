"""Drawing with a small checkpoint: pictures in Python, files of the command, options, and damaged checkpoints."""

import base64
import json
from io import BytesIO
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from services import predictor_of, tiny

import vlm
from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run
from vlm.data.images.codebook import PatchCodebook
from vlm.decoding.image_tokens import ImageSampling, sample_image_tokens
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.inference.command_options import DrawingOptions
from vlm.inference.predictor import load_predictor
from vlm.tasks.text_to_image.command import picture_name
from vlm.tasks.text_to_image.predict import ImageDrawer, check_drawing, encode_descriptions

CPU = ["--device", "cpu", "--precision", "fp32"]
TEXTS = ["a small red circle", "a large blue cross"]


def drawer() -> ImageDrawer:
    made = predictor_of(tiny("text_to_image"))
    assert isinstance(made, ImageDrawer)
    return made


def draw(texts: list[str], **options: float) -> list[list[Image.Image]]:
    return list(drawer().predict(texts, DrawingOptions(**options)))  # type: ignore[arg-type]


def is_same(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and one.tobytes() == other.tobytes()


def test_pictures_are_the_sampled_tokens_of_the_codebook() -> None:
    made = drawer()
    context, empty = (encode_descriptions(made.model, made.rows(texts)) for texts in (TEXTS, [""]))
    options = ImageSampling(sampling=Sampling(temperature=0.5, top_k=4), guidance=3, seed=7)
    ids = [f"{text} 0" for text in TEXTS]
    tokens = sample_image_tokens(made.model.decoder, context, options, empty=empty, ids=ids)
    pictures = draw(TEXTS, temperature=0.5, top_k=4, guidance=3, seed=7)
    for row, (picture,) in zip(made.codebook.decode(tokens), pictures, strict=True):
        assert np.array_equal(np.asarray(picture), row.permute(1, 2, 0).numpy())
        assert picture.size == (32, 32) and picture.mode == "RGB"


def test_results_are_several_pictures_and_a_picture_depends_on_its_text_and_seed_alone() -> None:
    three = draw(TEXTS, results=3, temperature=2, guidance=1)
    assert [len(pictures) for pictures in three] == [3, 3]
    assert len({picture.tobytes() for pictures in three for picture in pictures}) == 6
    assert is_same(draw(TEXTS[1:], temperature=2, guidance=1)[0][0], three[1][0])
    assert not is_same(draw(TEXTS[:1], seed=1, temperature=2, guidance=1)[0][0], three[0][0])
    one = draw(TEXTS[:1], results=2, temperature=0)[0]
    assert is_same(*one)


def test_unset_options_are_the_checkpoints() -> None:
    assert drawer().drawing == {"temperature": 0.7, "guidance": 2.0}
    given = draw(TEXTS, temperature=0.7, guidance=2.0)
    assert all(is_same(one, other) for (one,), (other,) in zip(draw(TEXTS), given, strict=True))
    assert DrawingOptions(guidance=1).resolve({"top_k": 5, "guidance": 3}) == ImageSampling(
        sampling=Sampling(temperature=1.0, top_k=5), guidance=1
    )
    assert drawer().width(DrawingOptions(results=3)) == 6 and drawer().width(DrawingOptions(guidance=1)) == 1


def test_python_returns_an_image_or_lists() -> None:
    model = vlm.load(tiny("text_to_image"), device="cpu", precision="fp32")
    one, two = model.draw(TEXTS[0]), model.draw(TEXTS, results=2, seed=3)
    assert isinstance(one, Image.Image) and [len(pictures) for pictures in two] == [2, 2]
    assert is_same(one, draw(TEXTS[:1])[0][0])
    with pytest.raises(UserError, match=r"--guidance 101 is invalid"):
        model.draw(TEXTS[0], guidance=101)
    with pytest.raises(UserError, match="results: 0 is out of range"):
        model.draw(TEXTS[0], results=0)
    with pytest.raises(UserError, match=r"--temperature -1 is invalid"):
        model.draw(TEXTS[0], temperature=-1)


def test_the_command_writes_a_file_per_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, flags = tmp_path / "new" / "pictures", [part for text in TEXTS for part in ("--text", text)]
    assert run(["draw", *flags, "-c", tiny("text_to_image"), "--out", str(folder), *CPU]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [text for text, _ in lines] == TEXTS
    for (_, path), (picture,) in zip(lines, draw(TEXTS), strict=True):
        assert Path(path).parent == folder and is_same(Image.open(path), picture)
    more = ["--results", "2", "--format", "jsonl"]
    assert run(["draw", *flags, "-c", tiny("text_to_image"), "--out", str(folder), *more, *CPU]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(record["text"], record["rank"]) for record in records] == [(t, n) for t in TEXTS for n in (1, 2)]
    assert len({record["path"] for record in records}) == 4 and "image" not in records[0]
    assert all(
        is_same(Image.open(record["path"]), picture)
        for record, picture in zip(records, chain.from_iterable(draw(TEXTS, results=2)), strict=True)
    )


def test_an_exported_model_draws_the_same_and_has_no_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exported"
    assert run(["export", str(folder), "-c", tiny("text_to_image"), "--to", "safetensors"]) == 0
    again = vlm.load(folder, device="cpu", precision="fp32")
    assert all(is_same(one, other) for one, (other,) in zip(again.draw(TEXTS), draw(TEXTS), strict=True))
    for kind, message in (("pt2", "has no graph: its tokens are patches of a codebook"), ("huggingface", "no class")):
        assert run(["export", str(tmp_path / kind), "-c", tiny("text_to_image"), "--to", kind]) == 2
        assert message in capsys.readouterr().err


def test_names_of_files_are_safe_and_unique() -> None:
    assert picture_name("A red  circle/../x", 1).startswith("a-red-circle-x-")
    names = {picture_name(text, rank) for text in ("a b", "a-b", "a b ", "", "é", "é") for rank in (1, 2)}
    assert len(names) == 10 and all(len(name) < 90 and "/" not in name for name in names)


def test_mistakes_have_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["-c", tiny("captioning"), "--out", str(tmp_path)], "contains a model for captioning, not for text_to_image"),
        (["-c", tiny("text_to_image"), "--out", str(tmp_path / "file")], "cannot be written"),
        (["-c", tiny("text_to_image"), "--out", str(tmp_path), "--format", "xml"], "--format: 'xml' is unknown"),
        (["-c", tiny("text_to_image"), "--out", str(tmp_path), "--guidance", "-1"], "--guidance -1 is invalid"),
        (["-c", tiny("text_to_image")], "--out"),
    ):
        assert run(["draw", "--text", "a red circle", *arguments, *CPU]) == 2
        assert message in capsys.readouterr().err
    long = "a small red circle left of " * 8
    assert run(["draw", "--text", long, "-c", tiny("text_to_image"), "--out", str(tmp_path), *CPU]) == 0
    assert "note: 1 of 1 texts: more than the 94 tokens that the model reads" in capsys.readouterr().err


def test_records_hold_png_files() -> None:
    (pictures,) = draw(TEXTS[:1], results=2)
    records = drawer().record(TEXTS[0], pictures, DrawingOptions(results=2))
    for rank, (record, picture) in enumerate(zip(records, pictures, strict=True), 1):
        data = base64.b64decode(str(record["image"]))
        assert (record["text"], record["rank"]) == (TEXTS[0], rank) and is_same(Image.open(BytesIO(data)), picture)


def test_a_checkpoint_with_another_codebook_is_refused(tmp_path: Path) -> None:
    held = read(tiny("text_to_image"))
    book = dict(held["vlm"]["codebook"])
    few = PatchCodebook(drawer().codebook.codes[:9], patch_size=8, image_size=32)
    for number, (change, message) in enumerate(
        [
            ({"codebook": few.state()}, "the checkpoint has 9 codes, its model 64"),
            ({"codebook": book | {"image_size": 64}}, "the checkpoint's images have 8 x 8 tokens, its model 4 x 4"),
            ({"codebook": book | {"codes": book["codes"][:8]}}, "the stored codebook is invalid"),
            ({"drawing": {"beam": 2}}, "unsupported drawing option beam=2"),
        ]
    ):
        path = tmp_path / f"{number}.ckpt"
        write(path, {**held, "vlm": {**held["vlm"], **change}})
        with pytest.raises(UserError, match=message):
            load_predictor(str(path))
    assert check_drawing({"top_k": 3}) == {"top_k": 3}
