"""Training and evaluation of models that read images inside their texts, beside transformers."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import prompted_steps as steps
import pytest
import torch
import transformers as t
from image_text import MODELS, saved_image_text
from PIL import Image
from torch import Tensor

from vlm.checkpoint.load import load_model, read
from vlm.cli.main import run as command
from vlm.data.batch import PromptRows
from vlm.data.fields import ImageViewsField
from vlm.data.images.image import Preprocess
from vlm.data.records import Question, Record
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.prompt_field import CaptionPromptField, PromptField, QuestionPromptField
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.context import PLACE
from vlm.training.step.losses import row_losses, token_loss

SIZES = ((64, 64), (100, 60), (60, 130))
CACHED = "data.cache_features=true"
CLASSES = {
    "llava": t.LlavaForConditionalGeneration,
    "idefics3": t.Idefics3ForConditionalGeneration,
    "smolvlm": t.SmolVLMForConditionalGeneration,
    "paligemma": t.PaliGemmaForConditionalGeneration,
}


def picture(number: int) -> Image.Image:
    width, height = SIZES[number % len(SIZES)]
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8))


def make_record(number: int, images: int, *, single: bool = False) -> Record:
    """A record with two conversations about some images, or two questions."""
    questions = [
        Question("what color is it?", "a red circle"),
        Question("and the shape?", "it is a cross", before=(("user", "who are you?"), ("assistant", "a blue square"))),
    ]
    questions = [question._replace(before=()) for question in questions] if single else questions
    record = Record(f"r{number}", {"questions": questions})
    if images:
        record.open_image, *record.open_more = [partial(picture, 10 * number + at) for at in range(images)]
    return record


class Case:
    """A random folder of one family, as both sides load it, and a batch of records."""

    def __init__(self, folder: Path, name: str, counts: tuple[int, ...] = (1, 0, 2, 3)) -> None:
        torch.manual_seed(3)
        _, self.processor = saved_image_text(folder, name)
        self.name, self.folder, self.single = name, folder, name == "paligemma"
        self.about = read(str(folder))["vlm"]
        self.preprocess = Preprocess.from_state(self.about["preprocess"])
        self.field = self.make_field(QuestionPromptField)
        counts = (1, 1) if self.single else counts
        self.records = [make_record(number, count, single=self.single) for number, count in enumerate(counts)]

    def make_field(self, kind: type[PromptField], **options: Any) -> PromptField:
        field = kind(
            tokenizer=tokenizer_from_state(self.about["tokenizer"]),
            max_len=4000,
            path=str(self.folder),
            states=self.about["form"]["states"],
            preprocess=self.preprocess,
            **options,
        )
        field.restore(self.about)
        return field

    def batch(self) -> tuple[PromptRows, Tensor]:
        images = ImageViewsField(preprocess=self.preprocess)
        rows = self.field.collate([self.field.encode(record, (0, 0, n)) for n, record in enumerate(self.records)])
        pixels = images.collate([images.encode(record, (0, 0, 0)) for record in self.records])
        return rows, self.preprocess.normalize(pixels)

    def their_inputs(self, record: Record, turns: Any) -> dict[str, Tensor]:
        """What their processor makes of a conversation."""
        images = record.images() if "image" in record else None
        if self.single:
            prompt, answer = turns
            return dict(
                self.processor(text=f"<image>{prompt.text}", images=images, suffix=answer.text, return_tensors="pt")
            )
        messages = []
        for turn in turns:
            parts = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in turn.parts()]
            messages.append({"role": turn.role, "content": parts})
        text = self.processor.apply_chat_template(messages)
        if images is None:
            return dict(self.processor.tokenizer(text, return_tensors="pt"))
        return dict(self.processor(text=text, images=images, return_tensors="pt"))


@pytest.mark.sample(plain=3, slow=5)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_every_gradient_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path / "theirs", name)
    model = load_model(read(str(case.folder))).train()
    rows, pixels = case.batch()
    hidden = model(pixels, rows.tokens, rows.segments, rows.image_states, rows.scored)
    total, count = token_loss(hidden, rows.targets, model.head_parts)
    (total / count).backward()

    theirs = CLASSES[name.partition("_")[0]].from_pretrained(case.folder, attn_implementation="eager").train()
    sums, counts = torch.zeros(()), 0
    for record in case.records:
        for turns in case.field.conversations(record):
            tokens, generated = case.field.render(turns, case.field.squares(record))
            inputs = case.their_inputs(record, turns)
            inputs.pop("labels", None)
            if not case.single:
                inputs.pop("token_type_ids", None)
            ids = inputs["input_ids"][0].tolist()
            if not case.field.ends and not case.single:  # LLaVA's template ends no answer
                ids = [*ids[: len(tokens) - 1], case.field.tokenizer.eos_id]
                inputs |= {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
            assert [case.about["form"]["image_id"] if id == PLACE else id for id in tokens] == ids
            labels = torch.tensor([[id if flag else -100 for id, flag in zip(ids, generated, strict=True)]])
            scored = int((labels[:, 1:] != -100).sum())
            sums, counts = sums + scored * theirs(**inputs, labels=labels).loss, counts + scored
    assert counts == count
    (sums / counts).backward()
    torch.testing.assert_close(total / count, sums / counts, rtol=1e-6, atol=1e-6)

    # Their gradients, stored as weights, are read with the names and shapes of ours.
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.copy_(torch.zeros_like(parameter) if gradients[key] is None else gradients[key])
    shutil.copytree(case.folder, tmp_path / "gradients")
    theirs.save_pretrained(tmp_path / "gradients")
    stored = read(str(tmp_path / "gradients"))["state_dict"]
    for key, parameter in model.named_parameters():
        wanted = stored[f"model.{key}"]
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (found - wanted).abs().max() <= 3e-5 * wanted.abs().max() + 1e-7, key


def test_twenty_steps_of_sgd_end_with_the_weights_of_trl(tmp_path: Path) -> None:
    """The fixture is what benchmarks/references/trl.sh wrote with SFTTrainer of TRL 1.16.0."""
    steps.save_start(tmp_path / "start")
    ended = steps.summarise(steps.train(tmp_path / "start", steps.make_records()))
    start = steps.summarise(steps.read_weights(tmp_path / "start"))
    fixture = json.loads((Path(__file__).parents[2] / "checkpoint" / "files" / "trl.json").read_text())
    assert ended.keys() == fixture.keys()
    for name, values in fixture.items():
        assert ended[name] == pytest.approx(values, abs=1e-5, rel=1e-5), name
    assert sum(start[name] != pytest.approx(values, abs=1e-4, rel=1e-4) for name, values in fixture.items()) > 30


@torch.no_grad()
def test_packed_texts_have_the_losses_of_single_ones(tmp_path: Path) -> None:
    case = Case(tmp_path / "theirs", "smolvlm_tiles")
    model = load_model(read(str(case.folder))).eval()
    rows, pixels = case.batch()
    hidden = model(pixels, rows.tokens, rows.segments, rows.image_states, rows.scored)
    packed, _ = row_losses(hidden, rows.targets, model.head_parts)
    first = 0
    for record, loss in zip(case.records, packed, strict=True):
        conversations, total = case.field.conversations(record), torch.zeros(())
        views = case.field.count_states(case.field.squares(record)) // case.field.states
        for place in range(len(conversations)):
            single = Record(record.id, {"questions": [record["questions"][place]]})
            single.open_image, single.open_more = record.open_image, record.open_more
            one = case.field.collate([case.field.encode(single, (0, 0, 0))])
            hidden = model(pixels[first : first + views], one.tokens, one.segments, one.image_states, one.scored)
            total += row_losses(hidden, one.targets, model.head_parts)[0].sum()
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=1e-4)
        first += views


def test_images_are_read_at_their_places(tmp_path: Path) -> None:
    case = Case(tmp_path / "theirs", "smolvlm")
    places = ((0,), (), (8,))
    before = (("user", "what is this?"), ("assistant", "a cat"))
    record = make_record(0, 2)
    record.values = {"questions": [Question("compare with this", "a dog", before=before, image_places=places)]}
    (turns,) = case.field.conversations(record)
    assert [turn.places for turn in turns] == [(0,), (), (8,), ()]
    ids = case.their_inputs(record, turns)["input_ids"][0].tolist()
    tokens = case.field.render(turns, case.field.squares(record)).tokens
    assert [case.about["form"]["image_id"] if id == PLACE else id for id in tokens] == ids


def test_a_training_row_holds_the_conversations_that_fit(tmp_path: Path) -> None:
    case = Case(tmp_path / "theirs", "smolvlm")
    field, record = case.field, make_record(0, 1)
    longest = max(count for _, count in field.lengths(record))
    field.max_len = longest
    rows = [field.encode(record, (0, epoch, 0)) for epoch in range(8)]
    assert {len(row.texts) for row in rows} == {1}
    assert {len(row.texts[0].tokens) for row in rows} == {count for _, count in field.lengths(record)}
    field.max_len = longest - 1
    with pytest.raises(UserError, match=f"r0: a conversation has {longest} tokens .* set data.max_len={longest}"):
        for epoch in range(8):
            field.encode(record, (0, epoch, 0))


def test_an_instruction_replaces_that_of_the_folder(tmp_path: Path) -> None:
    case = Case(tmp_path / "theirs", "paligemma")
    record = make_record(0, 1)
    record.values = {"captions": ["a dog"], "references": ["a dog"]}
    field = case.make_field(CaptionPromptField, prompt="describe en")
    (turns,) = field.conversations(record)
    assert turns[0].text == "describe en"
    record = make_record(0, 1)
    with pytest.raises(UserError, match="r0: a conversation has several turns, but this model reads single"):
        case.field.conversations(record)


def test_a_template_that_rewrites_earlier_answers_is_evaluated_by_the_last(tmp_path: Path) -> None:
    case = Case(tmp_path / "theirs", "smolvlm")
    assert case.field.form is not None and isinstance(case.field.form.chat, ChatTemplate)
    text = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}:{% for c in m['content'] %}{% if c['type'] == 'image' %}"
        "<image>{% elif m['role'] == 'user' or m is sameas messages[-1] %}{{ c['text'] }}{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    case.field.form = replace(case.field.form, chat=replace(case.field.form.chat, text=text))
    record = make_record(0, 1)
    record.values = {"questions": [record["questions"][1]]}
    with pytest.raises(UserError, match=re.escape("add {% generation %} and {% endgeneration %}")):
        case.field.encode(record, (0, 0, 0))
    record.values |= {"partner": record, "index": 0, "partner_index": 0}
    row = case.field.encode(record, None)
    (tokens, generated) = row.texts[0]
    written = [token for token, flag in zip(tokens, generated, strict=True) if flag]
    assert case.field.tokenizer.decode(written).strip() == "it is a cross"
    assert tokens[: generated.index(True)] == list(row.prompts[0])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A table of captions and a file of conversations about ten images, one of them without an image."""
    folder = tmp_path / "data"
    folder.mkdir()
    captions, chats = ["image,caption,split"], []
    for number in range(10):
        picture(number).save(folder / f"{number}.png")
        split = "train" if number < 7 else "val"
        captions += [f"{number}.png,a red circle {number},{split}", f"{number}.png,circle {number % 3},{split}"]
        turns = [{"from": "human", "value": "<image>\nwhat is it?"}, {"from": "gpt", "value": f"a cat {number}"}]
        chats.append({"image": f"{number}.png", "conversations": turns, "split": split})
    chats.append({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]})
    chats[-1]["split"] = "train"
    (folder / "captions.csv").write_text("\n".join(captions) + "\n")
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smolvlm_tiles", "paligemma"])
def test_an_evaluation_scores_the_captions_of_the_command(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    saved_image_text(tmp_path / "theirs", name)
    folder, out = str(tmp_path / "theirs"), tmp_path / "out"
    table = ["data=captions", f"data.path={data / 'captions.csv'}", "data.num_workers=0"]
    assert command(["evaluate", "-c", folder, "task=captioning", *table, "--split", "val", "--out", str(out)]) == 0
    predicted = {row["image_id"]: row["caption"] for row in json.loads((out / "predictions.json").read_text())}
    capsys.readouterr()
    paths = [str(data / image) for image in predicted]
    assert (
        command(["caption", *paths, "-c", folder, "--format", "jsonl", "--max-tokens", "64", "--precision", "fp32"])
        == 0
    )
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    assert {Path(row["image"]).name: row["caption"] for row in lines} == predicted

    texts = [(f"{n}.png", text) for n in range(7, 10) for text in (f"a red circle {n}", f"circle {n % 3}")]
    references = {"annotations": [{"image_id": image, "caption": text} for image, text in texts]}
    (tmp_path / "references.json").write_text(json.dumps(references))
    results = [{"image_id": image, "caption": caption} for image, caption in predicted.items()]
    (tmp_path / "results.json").write_text(json.dumps(results))
    scored = tmp_path / "scores.json"
    words = [
        str(tmp_path / "results.json"),
        str(tmp_path / "references.json"),
        "--format",
        "json",
        "--out",
        str(scored),
    ]
    assert command(["score", *words]) == 0
    metrics = json.loads((out / "metrics.json").read_text())
    for metric, value in json.loads(scored.read_text()).items():
        if f"val/{metric}" in metrics:
            assert metrics[f"val/{metric}"] == pytest.approx(value, abs=1e-12), metric


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["model/adapt=lora"],
        ["model/adapt=lora", "task.freeze=[encoder]", CACHED],
        ["task.freeze=[encoder.backbone]", CACHED],
    ],
    ids=["whole", "lora", "cached states", "cached features"],
)
def test_a_run_that_is_interrupted_ends_with_the_same_weights(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    """Also with cached features of the images and their squares; without them, weights differ by rounding."""
    saved_image_text(tmp_path / "theirs", "smolvlm_tiles")
    words = ["train", "model=pretrained", f"model.path={tmp_path / 'theirs'}", "task=conversations", "trainer=cpu"]
    words += ["data=conversations", f"data.path={data / 'chats.jsonl'}", "data.num_workers=0", "data.batch_size=4"]
    words += ["trainer.max_epochs=3", "schedule_steps=6", "test=false"]
    ends = []
    for kind in ("whole", "interrupted", *(["pixels"] if CACHED in options else [])):
        (tmp_path / kind).mkdir()
        monkeypatch.chdir(tmp_path / kind)
        words += options if kind == "whole" else []
        if kind == "whole":
            assert command(words) == 0
        elif kind == "pixels":
            assert command([word for word in words if word != CACHED]) == 0
            assert len([*(tmp_path / "whole").glob("runs/cache/*.features")]) == 1
        else:
            assert command([*words, "trainer.max_steps=3"]) == 0
            assert command(["train", "resume=last", "trainer.max_steps=-1"]) == 0
        (path,) = Path("runs").glob("*/*/checkpoints/last.ckpt")
        ends.append(torch.load(path, weights_only=True))
    first, second, *others = ends
    assert first["global_step"] == second["global_step"] == 6
    assert first["state_dict"].keys() == second["state_dict"].keys()
    assert all(torch.equal(first["state_dict"][key], second["state_dict"][key]) for key in first["state_dict"])
    for other in others:
        torch.testing.assert_close(other["state_dict"], first["state_dict"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_run_may_be_evaluated_on_texts_only(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_image_text(tmp_path / "theirs", "smolvlm")
    rows = [json.loads(line) for line in (data / "chats.jsonl").read_text().splitlines()]
    rows = [row | {"split": "train" if "image" in row else "val"} for row in rows]
    (data / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    words = ["train", "model=pretrained", f"model.path={tmp_path / 'theirs'}", "task=conversations", "trainer=cpu"]
    words += ["data=conversations", f"data.path={data / 'chats.jsonl'}", "data.num_workers=0", "trainer.max_steps=1"]
    assert command([*words, "callbacks.grounding=null"]) == 0
    (path,) = Path("runs").glob("*/*/evaluation/val/metrics.json")
    metrics = json.loads(path.read_text())
    assert not [name for name in metrics if name.endswith(("@blank", "@shuffled"))]  # there is no image to replace
    assert "val/accuracy" in metrics
