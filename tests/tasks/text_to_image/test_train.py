"""Training on pictures: the loss by hand, what judges see, dropped captions, and settings that cannot work."""

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from journey import interrupt_at, only_run, same_weights
from small import command
from tiny_checkpoints import ROOT

from vlm.checkpoint.load import read
from vlm.config.compose import compose
from vlm.data.images.image import load_image
from vlm.data.records import Record
from vlm.data.text.inputs import DescriptionField, encode_text
from vlm.data.text.tokenizer import ByteTokenizer
from vlm.errors import UserError
from vlm.tasks.text_to_image.train import CAPTIONER, PIXELS, TextToImageTask, find_captioner, load_captioner
from vlm.training.config.check import check
from vlm.training.run.build import build_data, build_model, build_task
from vlm.training.run.fit import main

CAPTIONER_PATH = ROOT / "data" / "sample" / "captioner.ckpt"


def build_small(*more: str) -> tuple[TextToImageTask, object]:
    config = compose(command("text_to_image", "trainer.precision=32-true", *more))
    data = build_data(config)
    data.prepare()
    model, _ = build_model(config, data.sizes)
    task = build_task(config, model, data)
    assert isinstance(task, TextToImageTask)
    return task.eval(), data


def test_the_loss_is_the_cross_entropy_of_every_token_given_those_before_it(tmp_path: Path) -> None:
    task, data = build_small(f"runs={tmp_path}")
    batch = next(iter(data.train_dataloader()))  # type: ignore[attr-defined]
    term = task.loss(batch)["tokens"]
    texts, tokens = batch["text"], batch["images"].tokens
    assert batch["images"].pixels is None and tokens.shape == (8, 16)
    hidden = task.model(texts.tokens, tokens, texts.segments, texts.types, texts.layout)
    expected = F.cross_entropy(task.model.head(hidden).flatten(0, 1), tokens.flatten(), reduction="sum")
    assert term.count == tokens.numel() and torch.allclose(term.total, expected, rtol=1e-5)
    assert task.work(batch).length == 16


def test_the_codebook_depends_on_the_data_and_the_seed_and_is_stored(tmp_path: Path) -> None:
    task, data = build_small(f"runs={tmp_path}")
    again, _ = build_small(f"runs={tmp_path}")
    field = task.image_field
    assert torch.equal(field.learned.codes, again.image_field.learned.codes) and len(field.learned) == 64
    stored = task.description()
    assert stored["codebook"] == field.learned.state()
    assert stored["drawing"] == {"temperature": 0.85, "guidance": 2.0}
    other, _ = build_small(f"runs={tmp_path}", "seed=4")
    assert not torch.equal(field.learned.codes, other.image_field.learned.codes)
    # More codes than there are different patches.
    few, _ = build_small(f"runs={tmp_path}", "task.fields.images.num_codes=4096")
    assert few.model.decoder.num_codes == len(few.image_field.learned) < 4096
    images = torch.stack([few.preprocess(record.image()) for record in data.split("train").records(3)])  # type: ignore[attr-defined]
    learned = few.image_field.learned
    assert torch.equal(learned.decode(learned.encode(images)), images)


def test_a_caption_is_drawn_by_key_and_dropped_as_often_as_the_option_says() -> None:
    field = DescriptionField(tokenizer=ByteTokenizer(), max_len=40, dropped=0.25)
    record = Record("r", {"captions": ["red", "blue"], "references": ["red", "blue", "green"]})

    def text(key: tuple[int, ...] | None) -> str:
        ((row, _, _),) = field.encode(record, key).rows
        return field.tokenizer.decode(list(row))

    drawn = [text((0, 0, index)) for index in range(2000)]
    assert drawn == [text((0, 0, index)) for index in range(2000)]
    shares = {caption: drawn.count(caption) / 2000 for caption in ("", "red", "blue")}
    assert sum(shares.values()) == 1 and all(
        abs(share - want) < 0.04 for share, want in zip(shares.values(), (0.25, 0.375, 0.375), strict=True)
    )
    evaluated = field.encode(record, None)
    assert evaluated.texts[1:] == ["red", "blue", "green"] and text(None) == evaluated.texts[0] != ""
    lengths = [len(encode_text(field.tokenizer, 40, caption).ids) for caption in ("red", "blue")]
    assert field.length(record) == round(sum(lengths) / 2)


def test_the_captioner_finds_several_true_captions_of_a_picture() -> None:
    judge = load_captioner(str(CAPTIONER_PATH), torch.device("cpu"))
    images = [load_image(str(path)) for path in sorted((ROOT / "data" / "sample").glob("*.png"))]
    found = judge(images)
    assert len(found) == len(images) and judge([]) == []
    assert all(captions and len(set(captions)) == len(captions) for captions in found)
    assert max(map(len, found)) >= 2 and min(map(len, found)) == 1


@pytest.mark.slow
def test_an_evaluation_draws_judges_and_shows_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"task.captioner={CAPTIONER_PATH}", "data.image_size=64", "trainer.max_epochs=1"]
    assert main(command("text_to_image", "trainer.precision=32-true", f"runs={tmp_path}", *options)) == 0
    (folder,) = tmp_path.glob("*/*/evaluation/test")
    scores = json.loads((folder / "metrics.json").read_text())
    for judge in (PIXELS, CAPTIONER):
        assert {
            f"test/{judge}{end}" for end in ("", "@shuffled", "@random", "@ceiling", "@low", "@high")
        } <= scores.keys()
    assert scores[f"test/{PIXELS}@ceiling"] > scores[f"test/{PIXELS}"]
    assert scores["test/codebook_error"] > 0
    pictures = json.loads((folder / "details.json").read_text())["pictures"]
    assert len(pictures) == 12 and all({PIXELS, CAPTIONER} == row["matches"].keys() for row in pictures.values())
    assert (folder / "report.html").read_text().count("data:image/png") >= 8


@pytest.mark.slow
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_weights_and_codebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = command("text_to_image", "trainer.precision=32-true", "trainer.max_epochs=1")
    assert main([*options, f"runs={tmp_path / 'whole'}"]) == 0
    with monkeypatch.context() as patch:
        interrupt_at(3, signal.SIGTERM, patch)
        assert main([*options, f"runs={tmp_path / 'parts'}"]) == 143
    assert main([f"resume={only_run(tmp_path / 'parts')}"]) == 0
    whole, parts = (only_run(tmp_path / name) / "checkpoints" / "last.ckpt" for name in ("whole", "parts"))
    assert same_weights(whole, parts)
    assert read(whole)["vlm"]["codebook"] == read(parts)["vlm"]["codebook"]


def test_a_captioner_must_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_captioner(None) is None and find_captioner("data/sample/captioner.ckpt") is None
    assert "note: task.captioner: data/sample/captioner.ckpt is not here" in capsys.readouterr().err
    assert find_captioner(str(CAPTIONER_PATH)) == str(CAPTIONER_PATH)
    with pytest.raises(UserError, match=r"task.captioner: other.ckpt does not exist"):
        find_captioner("other.ckpt")
    tagger = ROOT / "tests" / "checkpoint" / "files" / "tagging.ckpt"
    with pytest.raises(UserError, match=r"task.captioner: .* is a model for tagging; give one for captioning"):
        load_captioner(str(tagger), torch.device("cpu"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.fields.images.patch_size=7", "patch_size: 7 does not divide"),
        ("task.guidance=-1", "task.guidance: -1 is out of range"),
        ("task.fields.images.num_codes=1", "task.fields.images.num_codes: 1 is out of range"),
        ("task.temperature=-1", "task.temperature: -1 is out of range"),
        ("task.fields.text.dropped=2", "task.fields.text.dropped: 2 is out of range"),
        ("data.cache_features=true", "data.cache_features: the encoder reads texts"),
        (
            "data.augment={_target_: vlm.data.images.augment.Augment, image_size: 64}",
            "data.augment: is not supported for images that become",
        ),
    ],
)
def test_settings_that_cannot_work_are_named_before_training(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(compose(command("text_to_image", override)))
