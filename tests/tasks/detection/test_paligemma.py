"""PaliGemma detects with its own location tokens: ids and boxes are those of transformers on a random folder."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging import photos, wide
from image_text import paligemma, saved_image_text
from journey import only_run
from PIL import Image
from transformers import AutoProcessor

import vlm
from vlm.cli.main import run
from vlm.config.compose import compose
from vlm.data.boxes import find_locations
from vlm.inference.command_options import DetectionOptions
from vlm.models.context import PLACE
from vlm.tasks.detection.predict import PromptedDetector
from vlm.training.run.build import build_data

FIND = ["dog", "red cat; dog", "a; b; c", "bird", "cat", "big one; dog"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    """A random PaliGemma with location tokens, its processor and its folder."""
    torch.manual_seed(95)  # of whose texts some have boxes
    folder = str(tmp_path_factory.mktemp("paligemma") / "folder")
    model, processor = paligemma()
    model = wide(model, std=0.3)
    processor.save_pretrained(folder)
    model.save_pretrained(folder)
    return model, processor, folder


def parse(tokenizer: Any, row: list[int]) -> list[tuple[str, tuple[int, ...], list[int]]]:
    """Label, top, left, bottom and right of each object in a text, and the indices of its tokens."""
    found: list[tuple[str, tuple[int, ...], list[int]]] = []
    tokens = tokenizer.convert_ids_to_tokens(row)
    kinds = "".join("L" if re.fullmatch(r"\u2581?<loc\d{4}>", token) else "w" for token in tokens)
    for match in re.finditer(r"(?<!L)LLLL(w+)", kinds):
        numbers = tuple(int(tokens[at][-5:-1]) for at in range(match.start(), match.start() + 4))
        words = [*range(*match.span(1))]
        while words and not tokenizer.decode([row[words[-1]]], skip_special_tokens=True).strip(" ;"):
            words.pop()
        if words and numbers[0] < numbers[2] and numbers[1] < numbers[3]:
            found.append(
                ("".join(tokens[at] for at in words), numbers, [*range(match.start(), match.start() + 4), *words])
            )
    return found


@torch.no_grad()
def test_ids_and_boxes_are_those_of_transformers(published: tuple[Any, Any, str], tmp_path: Path) -> None:
    model, processor, folder = published
    torch.manual_seed(1)
    ours, paths = PromptedDetector(folder), photos(tmp_path / "photos", len(FIND))
    options = [DetectionOptions(find=find, max_tokens=80) for find in FIND]
    sources = [ours.sources([path], one)[0] for path, one in zip(paths, options, strict=True)]
    prepared = [ours.prepare(source, one) for source, one in zip(sources, options, strict=True)]
    texts, results, compared = ours.write(prepared, options[0]), ours.predict(prepared, options[0]), 0
    for at, (path, find) in enumerate(zip(paths, FIND, strict=True)):
        image = Image.open(path).convert("RGB")
        inputs = processor(text=f"<image>detect {' ; '.join(find.split('; '))}", images=image, return_tensors="pt")
        inputs["pixel_values"] = ours.preprocess.normalize(prepared[at].prompt.pixels)
        told = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
        out = model.generate(**inputs, max_new_tokens=80, **told)
        row = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logprobs = [scores[0].log_softmax(-1)[id].item() for scores, id in zip(out.logits, row, strict=True)]
        row = row[:-1] if row[-1] == processor.tokenizer.eos_token_id else row
        if texts[at].tokens != row:  # of random weights, two tokens may be as likely
            assert min(float(-scores.topk(2).values.diff()) for scores in out.logits) <= 1e-3, at
            continue
        truth = parse(processor.tokenizer, row)
        boxes = []
        for label, (top, left, bottom, right), places in truth:
            edges = [left * image.width, top * image.height, right * image.width, bottom * image.height]
            boxes.append((math.exp(sum(logprobs[place] for place in places)), [edge / 1024 for edge in edges], label))
        found = results[at].objects
        assert len(found) == len(boxes)
        for item, (score, box, _) in zip(found, sorted(boxes, key=lambda box: -box[0]), strict=True):
            assert item.score == pytest.approx(score, rel=1e-3) and item.box == pytest.approx(box, abs=1e-3)
        compared += len(boxes)
    assert compared >= 2


def test_the_command_and_python_need_classes(published: tuple[Any, Any, str], tmp_path: Path, capsys: Any) -> None:
    folder, (path,) = published[2], photos(tmp_path / "photos", 1)
    words = ["detect", path, "-c", folder, "--format", "jsonl", "--precision", "fp32"]
    assert run([*words, "--find", "dog; cat", "--max-tokens", "40", "--draw", str(tmp_path / "drawn")]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    model = vlm.load(folder, device="cpu", precision="fp32")
    with pytest.warns(UserWarning, match="no valid box or class"):
        objects = model.detect(path, find="dog; cat", max_tokens=40)
    assert [record["label"] for record in records] == ([item.label for item in objects] or [""])
    assert len([*(tmp_path / "drawn").iterdir()]) == 1
    for find, said in (
        ([], "--find: missing; this model finds the classes that a prompt names"),
        (["--find", "a <bos> b"], "contains the special token <bos>; remove it"),
        (["--find", "dog " * 3000], "tokens, and the model reads"),
    ):
        assert run([*words, *find]) == 2 and said in capsys.readouterr().err


ANSWERS = (
    "<loc0034><loc0333><loc0341><loc0794> red box",
    "<loc0000><loc0001><loc0512><loc1023> red box ; <loc0100><loc0200><loc0300><loc0400> red box",
    "",
)


@pytest.fixture
def table(published: tuple[Any, Any, str], tmp_path: Path) -> list[str]:
    """Options of a training on boxes as answers, with a folder whose tokenizer begins texts as Gemma's does."""
    folder = tmp_path / "gemma"
    shutil.copytree(published[2], folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = content["normalizer"]["normalizers"][1]  # without a space before the text
    content["decoder"]["decoders"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    rows = ["image,question,answer,split"]
    for number, path in enumerate(photos(tmp_path / "photos", 6)):
        rows.append(f"{path},detect red box,{ANSWERS[number % 2]},{'train' if number < 4 else 'val'}")
    (tmp_path / "boxes.csv").write_text("\n".join(rows))
    words = ["model=pretrained", f"model.path={folder}", "task=image_questions", "data=questions", "data.num_workers=0"]
    return [*words, f"data.path={tmp_path / 'boxes.csv'}", "task.fields.questions.prompt='{}'"]


def test_boxes_are_learned_as_answers_with_the_tokens_of_transformers(table: list[str], tmp_path: Path) -> None:
    data = build_data(compose(table))
    data.prepare()
    theirs, field, compared = AutoProcessor.from_pretrained(tmp_path / "gemma"), data.fields["questions"], 0
    for record in data.split("train").records():
        (text,) = field.encode(record, (0, 0, 0)).texts
        answer = record["questions"][0].answer
        inputs = theirs(text="<image>detect red box", suffix=answer, images=record.image(), return_tensors="pt")
        ids, labels = (inputs[name][0].tolist() for name in ("input_ids", "labels"))
        image = theirs.tokenizer.convert_tokens_to_ids("<image>")
        assert [PLACE if id == image else id for id in ids] == text.tokens
        assert [label != -100 for label in labels] == text.generated
        locations = find_locations(field.tokenizer)
        assert sum(id in locations for id in text.tokens) == 4 * answer.count("red box")
        compared += 1
    assert compared == 4


@pytest.mark.slow
def test_a_folder_that_learned_boxes_detects(table: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["trainer=cpu", "trainer.max_epochs=100", "data.batch_size=4", "optim.lr=2e-3", "test=false"]
    assert run(["train", *table, *more, "trainer.check_val_every_n_epoch=100", "callbacks.progress=null"]) == 0
    folder = str(only_run(tmp_path / "runs"))
    capsys.readouterr()
    image = str(tmp_path / "photos" / sorted(path.name for path in (tmp_path / "photos").iterdir())[0])
    assert run(["detect", image, "-c", folder, "--find", "red box", "--format", "jsonl", "--precision", "fp32"]) == 0
    (found,) = map(json.loads, capsys.readouterr().out.splitlines())
    width, height = Image.open(image).size
    edges = [333 / 1024 * width, 34 / 1024 * height, 794 / 1024 * width, 341 / 1024 * height]
    assert found["label"] == "red box"
    assert [found[name] for name in ("left", "top", "right", "bottom")] == pytest.approx(edges, abs=0.1)


def test_folders_are_not_trained_for_detection(table: list[str], capsys: Any) -> None:
    assert run(["check-data", *table, "task=detection", "data=boxes"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be trained for task=detection" in said and "boxes are answers of task=image_questions" in said


def test_other_captioners_are_refused(tmp_path: Path, capsys: Any) -> None:
    from tiny_checkpoints import FILES, IMAGES

    torch.manual_seed(3)
    saved_image_text(tmp_path / "smolvlm", "smolvlm")
    for checkpoint in (tmp_path / "smolvlm", FILES / "captioning.ckpt"):
        assert run(["detect", IMAGES[0], "-c", str(checkpoint), "--find", "dog"]) == 2
        assert (
            "this model has no location tokens; use PaliGemma, or a model of task=detection" in capsys.readouterr().err
        )
    assert run(["detect", IMAGES[0], "-c", str(FILES / "classification.ckpt")]) == 2
    assert "contains a model for classification, not for" in capsys.readouterr().err
