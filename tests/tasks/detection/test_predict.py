"""Detection with a small checkpoint: scores, prompts, boxes in pixels of the file, and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from services import predictor_of, tiny
from tiny_checkpoints import IMAGES

import vlm
from vlm.cli.main import run
from vlm.data.boxes import LocationCodec, WrittenObject, prompt_ids
from vlm.data.images.image import Preprocess, load_image
from vlm.errors import UserError
from vlm.inference.command_options import DetectionOptions
from vlm.inference.predictor import normalize_pixels
from vlm.tasks.detection.pictures import SIDE, draw_objects
from vlm.tasks.detection.predict import DetectedObject, ObjectDetector, place_objects, split_classes, write_objects

CPU = ["--device", "cpu", "--precision", "fp32"]


def detector() -> ObjectDetector:
    made = predictor_of(tiny("detection"))
    assert isinstance(made, ObjectDetector)
    return made


def test_a_score_is_the_product_of_probabilities_by_a_pass_over_the_text() -> None:
    made = detector()
    pixels = torch.stack([made.pixels(load_image(path)) for path in IMAGES])
    images = normalize_pixels(made.model, made.preprocess, pixels)
    prompts = [prompt_ids(made.tokenizer, classes) for classes in ((), ("red circle",), ("blue cross", "red circle"))]
    with torch.inference_mode():
        context, checked = made.model.encode(images), 0
        for row, (found, _) in enumerate(
            write_objects(made.model, made.tokenizer, context, prompts, max_tokens=20, known=made.classes)
        ):
            text = list(prompts[row])
            for item in found:
                ids = [made.tokenizer.location_ids[number] for number in item.numbers]
                ids += made.tokenizer.encode(item.label)
                hidden = made.model.decoder(torch.tensor([text + ids]), None, context.rows(slice(row, row + 1)))
                logprobs = made.model.head(hidden)[0].log_softmax(-1)
                expected = sum(logprobs[len(text) - 1 + at, token].item() for at, token in enumerate(ids))
                assert item.logprob == pytest.approx(expected, abs=1e-3)
                text += ids
                checked += 1
    assert checked >= 2


@pytest.mark.parametrize("resize", ["crop", "squash", "pad"])
def test_boxes_are_in_pixels_of_the_file(resize: str) -> None:
    preprocess, size, box = Preprocess(image_size=64, resize=resize), (200, 120), (60.0, 30.0, 110.0, 100.0)
    view, codec = preprocess.view(size), LocationCodec((64, 64), 65, 64)
    top, left, bottom, right = codec.encode(view.map_box(box))
    outside = WrittenObject("x", (0, 0, 5, 64), -1.0)  # in the border of a padded image
    found = place_objects(([WrittenObject("dog", (top, left, bottom, right), -0.5), outside], 2), codec, view, size)
    assert found.objects[0].label == "dog" and found.objects[0].score == pytest.approx(np.exp(-0.5))
    assert np.abs(np.subtract(found.objects[0].box, box)).max() <= 200 / 64 / 2 + 0.1  # half a bin
    assert (len(found.objects), found.unparsed) == ((1, 3) if resize == "pad" else (2, 2))
    assert all(
        0 <= low < high <= side
        for item in found.objects
        for low, high, side in zip(item.box[:2], item.box[2:], size, strict=True)
    )


def test_classes_to_find_are_separated_by_semicolons() -> None:
    assert split_classes(None) == [] and split_classes(" red  circle;;blue cross ; red circle") == [
        "red circle",
        "blue cross",
    ]
    for find, message in (
        (" ; ", "--find: names no class"),
        ("red circel", "--find red circel: not a class of this model; it has .* did you mean red circle"),
        ("; ".join(detector().classes), "--find: 12 classes are more than the model reads"),
    ):
        with pytest.raises(UserError, match=message):
            detector().check_options(DetectionOptions(find=find))


def test_a_prompt_changes_what_is_found_and_requests_share_a_batch() -> None:
    made, options = detector(), DetectionOptions(find="green triangle")
    (named,), (everything,) = made.sources(IMAGES[:1], options), made.sources(IMAGES[:1], DetectionOptions())
    assert (named[1], everything[1]) == (["green triangle"], [])
    alone = [made.predict([made.prepare(source, options)], options)[0] for source in (named, everything)]
    together = made.predict([made.prepare(source, options) for source in (named, everything)], options)
    for one, other in zip(alone, together, strict=True):
        assert [(item.label, item.box) for item in one.objects] == [(item.label, item.box) for item in other.objects]
    assert {item.label for item in alone[0].objects} <= {"green triangle"}
    least = max(item.score for item in alone[1].objects)
    kept = made.predict([made.prepare(everything, options)], DetectionOptions(min_score=least))[0]
    assert len(kept.objects) == 1


def test_records_of_images_with_and_without_objects(tmp_path: Path, capsys, monkeypatch) -> None:
    command = ["detect", *IMAGES[:2], "-c", tiny("detection"), *CPU]
    assert run(command) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert {line[0] for line in lines} == {*IMAGES[:2]} and {len(line) for line in lines} == {7}
    assert run([*command, "--format", "csv", "--out", str(tmp_path / "found.csv")]) == 0
    assert (tmp_path / "found.csv").read_text().startswith("image,label,score,left,top,right,bottom\n")
    assert run([*command, "--min-score", "1", "--format", "jsonl"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    nothing = dict.fromkeys(("score", "left", "top", "right", "bottom"))
    assert records == [{"image": path, "label": "", **nothing} for path in IMAGES[:2]]
    assert run([*command, "--min-score", "2"]) == 2 and "--min-score" in capsys.readouterr().err
    model = vlm.load(tiny("detection"), device="cpu", precision="fp32")
    objects = model.detect(IMAGES[0])
    assert [[item.label, round(item.score, 4)] for item in objects] == [
        [line[1], float(line[2])] for line in lines if line[0] == IMAGES[0]
    ]


def test_pictures_have_the_boxes_in_colours_and_true_ones_in_grey(tmp_path: Path, capsys) -> None:
    image = Image.new("RGB", (64, 40))
    found = [DetectedObject("cat", 0.9, (10.0, 20.0, 30.0, 36.0)), DetectedObject("dog", 0.5, (40.0, 4.0, 60.0, 30.0))]
    picture = draw_objects(image, found, [(2.0, 2.0, 8.0, 8.0)])
    factor = SIDE / 40
    assert picture.size == (round(64 * factor), SIDE) and image.getextrema() == ((0, 0),) * 3  # it is a copy
    pixels = np.asarray(picture)
    for item in found:
        left, top, right, bottom = (int(edge * factor) for edge in item.box)
        corners = pixels[[top, top, bottom - 1, bottom - 1], [left, right - 1, left, right - 1]]
        assert (corners == corners[0]).all() and corners[0].max() > 100
    grey = pixels[int(2 * factor), int(4 * factor)]
    assert grey.min() == grey.max() > 100
    assert draw_objects(Image.new("RGB", (500, 400)), []).size == (500, 400)
    large = Image.new("RGB", (4000, 2000))
    box = DetectedObject("cat", 0.9, (1000.0, 500.0, 3000.0, 1500.0))
    for longest, size in ((None, (4000, 2000)), (320, (320, 160))):  # reduced before the box is drawn
        picture = draw_objects(large, [box], longest=longest)
        painted = np.asarray(picture).max(2) > 100
        assert (
            picture.size == size and painted[size[1] // 2, size[0] // 4] and painted[size[1] // 2, size[0] * 3 // 4 - 1]
        )
        assert painted[:, size[0] // 2].sum() >= max(4, size[1] / 100)  # lines are as thick as the picture is large

    folder = tmp_path / "drawn"
    assert run(["detect", *IMAGES[:2], "-c", tiny("detection"), "--draw", str(folder), *CPU]) == 0
    files = sorted(folder.iterdir())
    assert len(files) == 2 and all(load_image(file).size[1] >= SIDE for file in files)
    (tmp_path / "file").write_text("")
    assert run(["detect", IMAGES[0], "-c", tiny("detection"), "--draw", str(tmp_path / "file"), *CPU]) == 2
    assert "--draw" in capsys.readouterr().err
