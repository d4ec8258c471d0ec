"""`vlm translate --image` on a tiny checkpoint."""

import json
import shutil

import pytest
from tiny_checkpoints import FILES, IMAGES

from vlm.cli.main import run
from vlm.inference import inputs
from vlm.tasks.photo_translation import predict as photo_translation

CHECKPOINT, TRANSLATOR = (str(FILES / f"{task}.ckpt") for task in ("photo_translation", "translation"))
TEXTS = ["a small colored circle", "there is a large colored cross", "you can see a large colored circle"]


@pytest.fixture
def translate(tmp_path):
    def translate(*arguments, status=0):
        path = tmp_path / "out"
        options = ["--precision", "fp32", "--device", "cpu", "--format", "jsonl", "--out", str(path)]
        assert run(["translate", *arguments, "-c", CHECKPOINT, *options]) == status
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]]

    return translate


def pairs_of(texts, images):
    pairs = [*(("--text", text) for text in texts), *(("--image", name) for name in images)]
    return [part for pair in pairs for part in pair]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--beam", "3", "--results", "2"], ["--sample", "--seed", "4"]])
def test_translations_do_not_depend_on_the_batch(translate, options):
    alone = translate(*pairs_of(TEXTS, IMAGES), *options, "--batch-size", "1")
    assert [row["text"] for row in alone[:: len(alone) // len(TEXTS)]] == TEXTS
    for size in ("2", "32"):
        for row, other in zip(translate(*pairs_of(TEXTS, IMAGES), *options, "--batch-size", size), alone, strict=True):
            assert (row["text"], row["translation"]) == (other["text"], other["translation"])
            assert row["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def test_the_photo_counts_and_one_may_be_for_all_texts(translate):
    first, second = translate(*pairs_of(TEXTS[:1] * 2, IMAGES[:2]))
    assert first["logprob"] != second["logprob"]
    both = translate(*pairs_of(TEXTS[:1] * 2, IMAGES[:1]))
    assert [row["logprob"] for row in both] == pytest.approx([first["logprob"]] * 2)


def test_a_photo_of_all_texts_is_read_once(translate, monkeypatch):
    opened, read = [], inputs.open_image
    for module in (photo_translation, inputs):
        monkeypatch.setattr(module, "open_image", lambda source: opened.append(source) or read(source))
    assert len(translate(*pairs_of(TEXTS, IMAGES[:1]))) == len(TEXTS)
    assert opened == IMAGES[:1]


def test_a_photo_that_cannot_be_read_is_named_and_the_others_are_done(translate, tmp_path, capsys):
    shutil.copy(__file__, tmp_path / "bad.png")
    rows = translate(*pairs_of(TEXTS, [IMAGES[0], str(tmp_path / "bad.png"), IMAGES[2]]), status=1)
    assert [row["text"] for row in rows] == [TEXTS[0], TEXTS[2]]
    assert "bad.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["translate", *pairs_of(TEXTS, IMAGES[:2])], "2 images for 3 texts; give one for each, or one for all"),
        (["translate", "--text", "a"], "missing"),
        (["predict", "a circle"], "missing"),
        (
            ["translate", *pairs_of(TEXTS[:1], IMAGES[:1]), "-c", TRANSLATOR],
            "not supported by a model for translation",
        ),
    ],
)
def test_wrong_use_is_named(arguments, named, capsys):
    assert run([*arguments, *([] if "-c" in arguments else ["-c", CHECKPOINT]), "--device", "cpu"]) == 2
    assert f"--image: {named}" in capsys.readouterr().err
