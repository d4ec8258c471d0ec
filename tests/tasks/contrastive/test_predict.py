"""Zero-shot classes and ranked images, of the tiny checkpoint."""

import json

import pytest
import tiny_checkpoints as tiny
import torch
import torch.nn.functional as F

from vlm.cli.main import run as vlm
from vlm.data.images.image import load_image
from vlm.inference.ranking import Classes, classes_record
from vlm.tasks.contrastive.predict import DualClassifier

PATH, CLASSIFIER = (str(tiny.FILES / f"{task}.ckpt") for task in ("contrastive", "classification"))
LABELS = ["red circle", "blue cross", "green triangle"]
PROMPTS = ["a small {}", "a large {} left of a {}"]
EXACT = ["-c", PATH, *tiny.EXACT]


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def encoder():
    return DualClassifier(PATH)


def given(flag, values):
    return [part for value in values for part in (flag, value)]


def test_probabilities_are_those_of_the_classes_mean_embeddings(encoder, capsys):
    options = [*given("--prompt", PROMPTS), *given("--label", LABELS), "--top", "3"]
    assert vlm(["classify", *tiny.IMAGES, *options, *EXACT]) == 0
    found = lines(capsys)
    heads = []
    for label in LABELS:
        each = torch.cat([encoder.embed_texts([prompt.replace("{}", label)]) for prompt in PROMPTS])
        torch.testing.assert_close(each.norm(dim=1), torch.ones(2))
        heads.append(F.normalize(each.mean(0), dim=0))
    for path, record in zip(tiny.IMAGES, found, strict=True):
        image = encoder.embed_images([encoder.pixels(load_image(path))])[0]
        truth = (encoder.model.scale.detach() * torch.stack(heads) @ image).softmax(0).tolist()
        assert [record["top"][label] for label in LABELS] == pytest.approx(truth, abs=1e-5)
        assert record["image"] == path and record["class"] == max(LABELS, key=record["top"].__getitem__)


def test_classes_may_stand_in_a_file_and_one_that_is_named_again_counts_once(tmp_path, capsys):
    (tmp_path / "names.txt").write_text("\n".join(LABELS) + "\n")
    found = []
    for options in (given("--label", LABELS), given("--label", LABELS * 2), ["--labels", str(tmp_path / "names.txt")]):
        assert vlm(["classify", *tiny.IMAGES, *options, *EXACT]) == 0
        found.append(lines(capsys))
    assert found[0] == found[1] == found[2]


def test_probabilities_of_classes_of_one_name_are_summed():
    best = Classes("b", 0.4, (("b", 0.4), ("a", 0.25), ("a", 0.25)))
    assert classes_record("jsonl", {}, best)["top"] == {"b": 0.4, "a": 0.5}


@pytest.mark.parametrize("count", [2, 10])
def test_images_are_ranked_by_their_similarity_to_each_text(count, encoder, capsys):
    texts = ["a small red circle", "a large blue cross"]
    assert (
        vlm(["retrieve", *tiny.IMAGES, *given("--text", texts), "--top", str(count), "--batch-size", "2", *EXACT]) == 0
    )
    found = lines(capsys)
    assert [record["text"] for record in found] == [text for text in texts for _ in range(min(count, 3))]
    images = encoder.embed_images([encoder.pixels(load_image(path)) for path in tiny.IMAGES])
    for text in texts:
        products = dict(zip(tiny.IMAGES, (images @ encoder.embed_texts([text])[0]).tolist(), strict=True))
        own = [record for record in found if record["text"] == text]
        best = sorted(products, key=products.__getitem__, reverse=True)[:count]
        assert [record["image"] for record in own] == best
        similarities = [record["similarity"] for record in own]
        assert similarities == pytest.approx([products[image] for image in best], abs=1e-4)


def test_an_image_that_cannot_be_read_is_named_and_the_others_are_ranked(tmp_path, capsys):
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert vlm(["retrieve", str(tmp_path / "bad.png"), *tiny.IMAGES, "--text", "a cross", *EXACT]) == 1
    said = capsys.readouterr()
    assert "bad.png" in said.err and len(said.out.splitlines()) == 3
    assert vlm(["retrieve", str(tmp_path / "bad.png"), "--text", "a cross", *EXACT]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["classify", *tiny.IMAGES], "--label: missing"),
        (["classify", *tiny.IMAGES, "--label", "x", "--prompt", "a photo"], "--prompt a photo: must contain {}"),
        (["classify", "--label", "x"], "IMAGES: missing"),
        (["classify", *tiny.IMAGES, "--label", "x", "--pair", "y"], "--pair: not supported by a model for contrastive"),
        (["predict", *tiny.IMAGES], "--label: missing"),
        (
            ["classify", *tiny.IMAGES, "--label", "x", "-c", CLASSIFIER],
            "--label: not supported by a model for classification",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_in_a_line(arguments, said, capsys):
    assert vlm([*arguments, *([] if "-c" in arguments else ["-c", PATH])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
