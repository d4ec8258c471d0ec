"""`vlm check-data` says of each fault in each source what training does: stop for the same reason, or skip it.

The faults are planted in 120 samples, below and above the limits, and both commands run as a user would run them.
"""

import io
import json
import re
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlm.cli.main import run as vlm

COUNT = 120
WORDS = ["dog", "cat", "bird", "man", "tree"]


@dataclass(frozen=True)
class Sample:
    """A sample before it is written in the format of a source."""

    number: int
    split: str
    image: str
    text: str
    invalid: bool = False

    @property
    def label(self) -> str:
        return "ab"[self.number % 2]


def sample(number: int) -> Sample:
    split = "val" if number % 10 == 8 else "test" if number % 10 == 9 else "train"
    return Sample(number, split, f"{number}.png", f"a {WORDS[number % 5]} and a {WORDS[number // 5 % 5]} {number % 7}")


def photo(number: int) -> bytes:
    coarse = np.random.default_rng(number).integers(0, 256, (6, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((64, 48), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def json_lines(root: Path, rows: list[Any]) -> Path:
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root / "rows.jsonl"


def captions_csv(root: Path, samples: list[Sample]) -> list[str]:
    lines = [f"{one.image},{one.text}{', more' * one.invalid},{one.split}" for one in samples]
    (root / "captions.csv").write_text("\n".join(["image,caption,split", *lines]))
    return ["data=captions", f"data.path={root}/captions.csv"]


def captions_jsonl(root: Path, samples: list[Sample]) -> list[str]:
    rows = [{"image": one.image, "caption": None if one.invalid else [one.text], "split": one.split} for one in samples]
    return ["data=captions", f"data.path={json_lines(root, rows)}"]


def coco(root: Path, samples: list[Sample]) -> list[str]:
    images = [{"id": one.number, "file_name": one.image} for one in samples]
    rows = [{"image_id": one.number, "caption": 3 if one.invalid else one.text} for one in samples]
    (root / "coco.json").write_text(json.dumps({"images": images, "annotations": rows}))
    return ["data=coco", f"data.root={root}", "data.path=coco.json"]


def caption_folder(root: Path, samples: list[Sample]) -> list[str]:
    for one in samples:
        (root / f"{one.number}.txt").write_text(one.text)
    return ["data=captions", f"data.root={root}"]


def questions(root: Path, samples: list[Sample]) -> list[str]:
    rows = [{"image": one.image, "question": "what?", "answer": one.text, "split": one.split} for one in samples]
    rows = [row | {"answer": None} if one.invalid else row for row, one in zip(rows, samples, strict=True)]
    return ["task=image_questions", "data=questions", f"data.path={json_lines(root, rows)}"]


def boxes(root: Path, samples: list[Sample]) -> list[str]:
    rows: list[dict[str, Any]] = []
    for one in samples:
        edges = {"left": 3, "top": 4, "right": 1 if one.invalid else 30, "bottom": 40}
        rows.append({"image": one.image, "label": one.text.split()[1], **edges, "split": one.split})
    return ["task=detection", "data=boxes", f"data.path={json_lines(root, rows)}"]


def coco_boxes(root: Path, samples: list[Sample]) -> list[str]:
    images = [{"id": one.number, "file_name": one.image, "width": 64, "height": 48} for one in samples]
    bbox = [3, 4, 20, 30]
    rows = [
        {"id": n, "image_id": one.number, "category_id": 9 if one.invalid else n % 2, "bbox": bbox}
        for n, one in enumerate(samples)
    ]
    categories = [{"id": number, "name": name} for number, name in enumerate(WORDS[:2])]
    (root / "coco.json").write_text(json.dumps({"images": images, "annotations": rows, "categories": categories}))
    return ["task=detection", "data=coco_boxes", f"data.root={root}", "data.path=coco.json"]


def conversations(root: Path, samples: list[Sample]) -> list[str]:
    user, rows = {"from": "human", "value": "<image>\nwhat?"}, []
    for one in samples:
        answer = {"from": "gpt", "value": one.text}
        turns = [answer, user] if one.invalid else [user, answer]
        rows.append({"image": one.image, "conversations": turns, "split": one.split})
    (root / "chats.json").write_text(json.dumps(rows))
    return ["task=conversations", "data=conversations", f"data.path={root}/chats.json"]


def image_folder(root: Path, samples: list[Sample]) -> list[str]:
    for one in samples:
        folder = root / "classes" / one.split / one.label
        folder.mkdir(parents=True, exist_ok=True)
        if (root / one.image).is_file():
            (folder / one.image).write_bytes((root / one.image).read_bytes())
    return ["task=classification", "data=image_folder", f"data.root={root / 'classes'}"]


def image_table(root: Path, samples: list[Sample]) -> list[str]:
    rows = [{"image": one.image, "label": None if one.text == "" else one.label, "split": one.split} for one in samples]
    rows = [row | {"label": 1.5} if one.invalid else row for row, one in zip(rows, samples, strict=True)]
    return ["task=classification", "data=image_table", f"data.path={json_lines(root, rows)}"]


def texts(root: Path, samples: list[Sample]) -> list[str]:
    rows: list[dict[str, Any]] = [{"text": one.text, "label": one.label, "split": one.split} for one in samples]
    rows = [row | {"text": 3.5} if one.invalid else row for row, one in zip(rows, samples, strict=True)]
    return ["task=text_classification", "data=texts", f"data.path={json_lines(root, rows)}"]


def translations(root: Path, samples: list[Sample]) -> list[str]:
    rows: list[Any] = [{"text": one.text, "translation": f"ein {one.number}", "split": one.split} for one in samples]
    rows = ["no row" if one.invalid else row for row, one in zip(rows, samples, strict=True)]
    return ["task=translation", "data=translations", f"data.path={json_lines(root, rows)}"]


def write_aligned(root: Path, samples: list[Sample]) -> list[str]:
    for split in ("train", "val", "test"):
        part = [one for one in samples if one.split == split]
        (root / f"{split}.en").write_text("".join(f"{one.text}\n" for one in part))
        (root / f"{split}.de").write_text("".join(f"ein {one.number}\n" for one in part))
    return ["task=translation", "data=aligned", f"data.root={root}", "data.from=en", "data.to=de"]


def conll(root: Path, samples: list[Sample]) -> list[str]:
    blocks = ["\n".join(f"{word}\tT" for word in one.text.split()) or "dog\t" for one in samples]
    (root / "tags.conll").write_text("\n\n".join(blocks))
    return ["task=tagging", "data=conll", f"data.path={root}/tags.conll"]


def squad(root: Path, samples: list[Sample]) -> list[str]:
    paragraphs = []
    for one in samples:
        answers = [{"text": "a", "answer_start": 0}]
        question = {"id": str(one.number), "question": one.text and f"what {one.number}?", "answers": answers}
        context: Any = 3 if one.invalid else f"a dog and a cat of {one.number} or {one.split}"
        paragraphs.append({"context": context, "qas": [question]})
    (root / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return ["task=span_answering", "data=squad", f"data.path={root}/squad.json"]


def text(root: Path, samples: list[Sample]) -> list[str]:
    for one in samples:
        folder = root / "documents" / one.split
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{one.number}.txt").write_text(one.text and f"{one.text}. {one.number}\n" * 4)
    return ["task=language_modeling", "data=text", f"data.root={root / 'documents'}", "data.max_len=16"]


def shards(root: Path, samples: list[Sample]) -> list[str]:
    (root / "shards").mkdir()
    with tarfile.open(root / "shards" / "000000.tar", "w") as tar:
        for one in samples:
            files = {"png": (root / one.image).read_bytes() if (root / one.image).is_file() else None}
            for suffix, data in (files | {"txt": one.text.encode()}).items():
                if data is not None:
                    info = tarfile.TarInfo(f"{one.number:06d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return ["data=webdataset", f"data.root={root / 'shards'}"]


IMAGES: list[Callable[[Path, list[Sample]], list[str]]] = [captions_csv, captions_jsonl, coco, caption_folder]
IMAGES += [questions, conversations, image_folder, image_table, shards, boxes, coco_boxes]
TABLES = [captions_csv, captions_jsonl, coco, questions, conversations, image_table, texts, translations, squad]
TABLES += [boxes, coco_boxes]
TEXTS = [
    captions_jsonl,
    caption_folder,
    questions,
    conversations,
    image_table,
    texts,
    translations,
    write_aligned,
    conll,
]
TEXTS += [squad, text, shards]
NAMED = [
    captions_csv,
    captions_jsonl,
    coco,
    questions,
    conversations,
    image_table,
    boxes,
    coco_boxes,
]  # rows that name image files
SPLIT = [captions_csv, captions_jsonl, questions, conversations, image_table, boxes]  # with a column of splits
ALL = list(dict.fromkeys([*IMAGES, *TABLES, *TEXTS]))
TRAIN = [number for number in range(COUNT) if number % 10 < 8]


def plant_fault(fault: str, count: int, root: Path) -> tuple[list[Sample], list[str]]:
    """The samples with a fault in some of train, and further overrides; images are written to the root."""
    samples = [sample(number) for number in range(COUNT)]
    for one in samples:
        (root / one.image).write_bytes(photo(one.number))
    chosen, more = TRAIN[3 : 3 + count], list[str]()
    for number in chosen:
        one = samples[number]
        if fault == "invalid row":
            samples[number] = replace(one, invalid=True)
        elif fault == "empty text":
            samples[number] = replace(one, text="")
        elif fault == "missing image":
            (root / one.image).unlink()
        elif fault == "upper-case suffix":
            (root / one.image).rename(root / f"{one.number}.PNG")
        elif fault == "unreadable image":
            (root / one.image).write_bytes(photo(number)[:200])
        elif fault == "two splits":
            samples.append(replace(one, split="val", text=f"{one.text} again"))
        elif fault == "unknown split":
            samples[number] = replace(one, split="odd")
        elif fault == "only train":
            samples = [replace(one, split="train") for one in samples]
        elif fault == "one sample":
            samples = samples[:1]
        elif fault == "small vocabulary":
            more = ["tokenizer.vocab_size=8"]
        elif fault == "no limit on unreadable images":
            (root / one.image).write_bytes(photo(number)[:200])
            more = ["callbacks.bad_samples=null"]
    return samples, more


CASES = [(write, "clean", 1) for write in ALL]
for fault, writers in {
    "invalid row": TABLES,
    "empty text": TEXTS,
    "missing image": NAMED,
    "upper-case suffix": NAMED,
    "unreadable image": IMAGES,
    "unknown split": SPLIT,
}.items():
    CASES += [(write, fault, count) for write in writers for count in (1, 5)]
CASES += [(write, "two splits", 1) for write in SPLIT]
CASES += [(write, "only train", 1) for write in [*SPLIT, texts, image_folder, text]]
CASES += [(write, "one sample", 1) for write in ALL]
CASES += [(write, "small vocabulary", 1) for write in (captions_csv, questions, texts, translations, squad, text)]
CASES += [(captions_csv, "no limit on unreadable images", 5)]
FEW = [
    (captions_csv, "invalid row", 5),
    (coco_boxes, "invalid row", 5),
    (conversations, "empty text", 1),
    (image_folder, "unreadable image", 5),
]

COMMON = ["trainer=cpu", "trainer.max_epochs=1", "test=false", "seed=0", "data.num_workers=0"]
COMMON += ["callbacks.progress=null"]
SIZE = ["model.size.dim=16", "model.size.num_heads=2"]


def overrides(arguments: list[str]) -> list[str]:
    task = next((each.partition("=")[2] for each in arguments if each.startswith("task=")), "captioning")
    decoders = ("captioning", "image_questions", "conversations", "detection", "translation")
    depth = ["model.size.encoder_depth=1"] if task != "language_modeling" else ["model.size.depth=1"]
    depth += ["model.size.decoder_depth=1"] if task in decoders else []
    images = ["data.image_size=32"] if task in (*decoders[:4], "classification") else []
    return [*COMMON, *SIZE, *depth, *images]


def agree(write: Callable[[Path, list[Sample]], list[str]], fault: str, count: int, root: Path, capsys: Any) -> str:
    """Runs both commands, compares them, and returns what check-data says of training."""
    data = root / "data"
    data.mkdir()
    samples, options = plant_fault(fault, count, data)
    arguments = write(data, samples)
    arguments += [*options, *overrides(arguments), f"runs={root / 'runs'}"]
    capsys.readouterr()
    checked = vlm(["check-data", *arguments])
    said = capsys.readouterr()
    trained = vlm(["train", *arguments])
    run = capsys.readouterr()
    assert checked in (0, 1, 2) and trained in (0, 1, 2), (said, run)
    plan = next((line for line in said.out.splitlines() if line.startswith("training ")), f"training    {said.err}")
    stops = plan.startswith(("training    stops", "training    error:"))
    assert stops == (trained != 0), (plan, run.err[-1500:])
    if stops:
        reason = run.err.strip().splitlines()[0].removeprefix("error: ")
        unreadable = re.match(r"\d+( of \d+ training samples could not be read)", reason)  # so far, of an epoch
        assert (unreadable[1] if unreadable else reason) in said.out + said.err, (reason, said)
        assert checked == 1 or checked == trained == 2
    elif fault != "no limit on unreadable images":  # without the callback, nothing names them
        named = [line.removeprefix("skipped: ") for line in run.out.splitlines() if line.startswith("skipped: ")]
        named += {line for line in run.out.splitlines() if line.startswith("skipped in validation: ")}
        more = [int(line.removesuffix(" more").replace(",", "")) for line in named if line.endswith(" more")]
        skipped = len(named) - len(more) + sum(more)
        stated = re.search(r"; skips ([\d,]+):", plan)
        assert (int(stated[1].replace(",", "")) if stated else 0) == skipped, (plan, named)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(("write", "fault", "count"), FEW)
def test_check_data_and_training_agree(write: Any, fault: str, count: int, tmp_path: Path, capsys: Any) -> None:
    agree(write, fault, count, tmp_path, capsys)


@pytest.mark.nightly
@pytest.mark.parametrize(("write", "fault", "count"), CASES)
def test_check_data_and_training_agree_on_every_fault(
    write: Any, fault: str, count: int, tmp_path: Path, capsys: Any
) -> None:
    agree(write, fault, count, tmp_path, capsys)


def check(root: Path, arguments: list[str], capsys: Any) -> tuple[int, list[str], str]:
    """Runs check-data; returns its status, the lines of STOPS without that word, and all that it printed."""
    capsys.readouterr()
    status = vlm(["check-data", *overrides(arguments), f"runs={root / 'runs'}", *arguments])
    said = capsys.readouterr()
    stops = [line.removeprefix("STOPS").strip() for line in said.out.splitlines() if line.startswith("STOPS")]
    return status, stops, said.out + said.err


# A column that does not exist, by source. Tables have no other unused column of the name that it is replaced by.
COLUMNS = [(captions_csv, "image"), (captions_csv, "caption"), (captions_jsonl, "caption"), (questions, "question")]
COLUMNS += [(questions, "answer"), (conversations, "conversation"), (image_table, "image"), (image_table, "label")]


@pytest.mark.sample(slow=5)
@pytest.mark.parametrize(("write", "column"), COLUMNS)
def test_a_wrong_column_hides_no_other_fault(write: Any, column: str, tmp_path: Path, capsys: Any) -> None:
    samples, _ = plant_fault("missing image", 5, tmp_path)
    samples[20] = replace(samples[20], invalid=True)
    broken = next(one for one in samples[30:] if one.split == "train")
    (tmp_path / broken.image).write_bytes(b"no image")
    arguments = [*write(tmp_path, samples), f"data.source.{column}_column=typo"]
    status, stops, said = check(tmp_path, arguments, capsys)
    assert status == 1 and "no column 'typo' among " in stops[0]
    assert f"set data.source.{column}_column to the right one, such as '{column}" in stops[0]
    assert any(" images are missing" in line for line in stops)
    assert any(re.match(r"1 of \d+ training samples could not be read", line) for line in stops)
    assert "invalid row: 1" in said and f"{broken.image}: damaged" in said
    trained = vlm(["train", *arguments, *overrides(arguments), f"runs={tmp_path / 'runs'}"])
    assert trained == 2 and stops[0] in capsys.readouterr().err  # training stops at the first with the same sentence


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize("write", [texts, translations])
def test_a_wrong_column_of_texts_hides_no_invalid_row(write: Any, tmp_path: Path, capsys: Any) -> None:
    samples, _ = plant_fault("invalid row", 5, tmp_path)
    status, stops, _ = check(tmp_path, [*write(tmp_path, samples), "data.source.text_column=txt"], capsys)
    assert status == 1 and "no column 'txt' among 'text', " in stops[0] and "such as 'text'" in stops[0]
    assert "5 of 120 rows are invalid" in stops[1]


@pytest.mark.slow
def test_all_faults_of_class_folders_are_found_in_one_run(tmp_path: Path, capsys: Any) -> None:
    samples, _ = plant_fault("unreadable image", 5, tmp_path)
    arguments = image_folder(tmp_path, samples)
    root = tmp_path / "classes"
    for name in ("train/c", "train/d", "train/e", "train/f", "val/b", "val/x", "val/y"):
        (root / name).mkdir()
    for name in ("val/x/1.png", "val/y/1.png", "val/b/0.png"):  # 0.png is in train/a
        (root / name).write_bytes(photo(0 if name == "val/b/0.png" else 500))
    status, stops, said = check(tmp_path, arguments, capsys)
    assert status == 1 and len(stops) == 3, said
    assert stops[0] == f"4 times: {root}/train/c: contains no image in a supported format; add images or remove it"
    assert f"  {root}/train/e: contains" in said and f"{root}/train/f: contains" not in said and "  and 1 more" in said
    assert stops[1].startswith(f"2 times: {root}/val/x: the training images have no class 'x'")
    assert stops[2].startswith("5 of 96 training samples could not be read")
    assert "SPOILS      image in two splits: 1" in said and "one image in two classes: 1" in said
    assert "skipped     unreadable image: 5" in said and "(and for 2 other reasons, see STOPS)" in said
    for folder in (*root.glob("train/[b-f]"), *root.glob("val/[xy]")):  # one class is left, and val has another
        shutil.rmtree(folder)
    status, stops, said = check(tmp_path, arguments, capsys)
    assert status == 1 and "has only one class, a; at least two are needed" in stops[0]
    assert "the training images have no class 'b'" in stops[1] and "training samples could not be read" in stops[2]


@pytest.mark.slow
def test_all_files_that_are_not_utf8_are_found_in_one_run(tmp_path: Path, capsys: Any) -> None:
    samples, _ = plant_fault("clean", 1, tmp_path)
    labelled = tmp_path / "labelled"
    for one in samples:
        (labelled / one.split / one.label).mkdir(parents=True, exist_ok=True)
        (labelled / one.split / one.label / f"{one.number}.txt").write_text(one.text)
    folders = {
        labelled: ["task=text_classification", "data=text_folder", f"data.root={labelled}"],
        tmp_path / "documents": text(tmp_path, samples),
        tmp_path: caption_folder(tmp_path, samples),
    }
    for folder, arguments in folders.items():
        files = sorted(folder.glob("train/**/*.txt") if folder != tmp_path else folder.glob("*.txt"))[:5]
        for path in files:
            path.write_bytes("ein\nsch\u00f6ner Tag".encode("latin-1"))
        status, stops, said = check(tmp_path, arguments, capsys)
        assert status == 1 and len(stops) == 1 and stops[0].startswith("5 times: "), said
        assert stops[0].endswith(", line 2: is not UTF-8; save the file in UTF-8")
        assert sum(f"{path}, line 2: is not UTF-8" in said for path in files) == 3 and "  and 2 more" in said


FEW_SAMPLES = [captions_csv, captions_jsonl, caption_folder, questions, conversations, image_table, texts]


@pytest.mark.sample(slow=5)
@pytest.mark.parametrize("write", [*FEW_SAMPLES, translations, conll, squad, shards])
def test_splits_of_few_samples_are_noted(write: Any, tmp_path: Path, capsys: Any) -> None:
    samples = plant_fault("only train", 1, tmp_path)[0][:4]
    _, _, said = check(tmp_path, [*write(tmp_path, samples), "test=true"], capsys)
    one, none = "note: data: of 4 samples, 1 is in val, so", "note: data: of 4 samples, none is in test, so that"
    assert one in said or none in said, said
    if write in SPLIT and write != image_table:  # which draws no test; the others draw by a hash, perhaps several
        assert one in said and none in said
