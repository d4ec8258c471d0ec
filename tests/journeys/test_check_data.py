"""`vlm check-data` finds every fault that is planted in a copy of a data set, and nothing in the clean one."""

import csv
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlm.cli.main import run as vlm
from vlm.data.shapes.scene_captions import Shapes
from vlm.evaluation.data_check.faults import find_exact_duplicates, find_near_duplicates, hash_image

WORDS = ["a dog", "two cats", "one man", "the child", "some birds"]
PLACES = ["on the grass", "by the river", "in the snow", "under a tree", "at home", "on a red sofa"]


def photo(seed: int, size: tuple[int, int] = (96, 72)) -> Image.Image:
    """A picture unlike any other: soft blots of colour."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


def rows_of(count: int = 40) -> list[list[str]]:
    splits = ["val" if n % 10 == 8 else "test" if n % 10 == 9 else "train" for n in range(count)]
    texts = [[f"{WORDS[n % 5]} {PLACES[n % 6]}", f"{WORDS[n % 5]} seen {PLACES[n % 6]}"] for n in range(count)]
    return [[f"{n:03d}.png", text, splits[n]] for n in range(count) for text in texts[n]]


def write(root: Path, rows: list[list[str]]) -> list[str]:
    with (root / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "caption", "split"], *rows])
    return ["data=captions", f"data.root={root}", "data.path=captions.csv", "data.max_len=24", f"runs={root}/runs"]


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    root = tmp_path / "clean"
    root.mkdir()
    for n in range(40):
        photo(n).save(root / f"{n:03d}.png")
    return root


def faults_of(said: str) -> dict[str, str]:
    """The lines of each kind of fault."""
    parts = re.split(r"\n(?:SPOILS|skipped|note) +", said.partition("\nverdict")[0])[1:]
    return {part.partition(":")[0]: part for part in parts}


@pytest.mark.slow
def test_nothing_in_a_clean_one(clean: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "page"
    assert vlm(["check-data", *write(clean, rows_of()), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert faults_of(said) == {} and "verdict     no problems found" in said
    assert "captions    80; 60 distinct captions\n" in said
    text = (out / "report.html").read_text()
    assert text.count('<figure class="card">') == 12 + 4 + 4 and "No problems found" in text
    assert 'name="viewport"' in text and not re.search(r"(src|href)=.?https?:", text)


@pytest.mark.slow
def test_one_caption_for_all(clean: Path, capsys) -> None:
    rows = [[name, "a photo", split] for name, _, split in rows_of()]
    assert vlm(["check-data", *write(clean, rows)]) == 1
    said = capsys.readouterr().out
    assert "captions    40; 1 distinct caption\n" in said
    assert "SPOILS      one caption for most images: 40 (100.0% of 40)" in said


@pytest.mark.slow
def test_every_planted_fault_is_found(clean: Path, tmp_path: Path, capsys) -> None:
    root = tmp_path / "corrupted"
    shutil.copytree(clean, root)
    rows = rows_of()
    (root / "003.png").write_bytes((root / "003.png").read_bytes()[:200])  # cut short
    shutil.copy(root / "004.png", root / "005.png")
    photo(6).resize((128, 96)).save(root / "007.png")
    shutil.copy(root / "010.png", root / "018.png")  # train and val
    photo(11).resize((64, 48)).convert("RGB").save(root / "019.png")  # train and test
    photo(99, (8, 8)).save(root / "020.png")
    photo(98).save(root / "nobody.png")
    rows[24][1] = "  "  # of 012
    rows[26][1] = rows[27][1]  # of 013
    rows[28][1] = "word " * 30  # of 014
    rows[16 * 2 + 4][1] = "狗在草地上"  # of 018, in val
    rows += [["gone.png", "not there", "train"], ["", "of no image", "train"], ["000.png", "another split", "test"]]
    assert vlm(["check-data", *write(root, rows), "--out", str(tmp_path / "page")]) == 1
    said = capsys.readouterr().out
    kinds = faults_of(said)
    planted = {
        "unreadable image": "003.png",
        "duplicate image": "train: 004.png = train: 005.png",
        "near duplicate image": "train: 006.png ~ train: 007.png",
        "image in two splits": "train: 010.png = val: 018.png",
        "nearly the same image in two splits": "train: 011.png ~ test: 019.png",
        "tiny image": "020.png: 8 x 8",
        "image without a caption": "nobody.png",
        "empty caption": "line 26: no caption",
        "repeated caption": "repeats a caption of 013.png",
        "over-long caption": "014.png",
        "characters spelled in bytes": "018.png: 狗在草地上 in: 狗在草地上",
        "caption without an image": "names no image",
        "missing image": "gone.png",
    }
    assert kinds.keys() == planted.keys()
    for kind, name in planted.items():
        assert name in kinds[kind], kind
    assert "000.png is in two splits" in kinds["image in two splits"]
    assert "SPOILS      image in two splits" in said
    stops = [line for line in said.splitlines() if line.startswith("STOPS")]
    assert len(stops) == 3  # as training does, which names the first only
    assert "000.png is in two splits" in stops[0] and "1 of 41 images are missing" in stops[1]
    assert "1 of 32 training samples could not be read, more than callbacks.bad_samples.limit=0.01 allows" in stops[2]
    assert "(and for 2 other reasons, see STOPS)" in said.splitlines()[-2]
    assert "  remedy: nothing is lost, but texts take more tokens; tokenizer.character_coverage=1.0 keeps" in said
    page = (tmp_path / "page" / "report.html").read_text()
    assert all(kind in page for kind in planted)


@pytest.mark.slow
def test_a_rare_letter_is_spelled_and_not_unknown(clean: Path, capsys) -> None:
    rows = rows_of()
    rows[0][1] = f"a Quest and {rows[0][1]}"  # the only Q of train
    coverage = ["tokenizer.byte_fallback=false", "tokenizer.vocab_size=400"]
    for overrides, kind, line in (
        ([], "characters spelled in bytes", "train: 000.png: Q in: a Quest"),
        (coverage, "unknown to the tokenizer", "train: 000.png: a Quest"),
        (["tokenizer.character_coverage=1.0"], None, None),
    ):
        assert vlm(["check-data", *write(clean, rows), "tokenizer.character_coverage=0.9985", *overrides]) == 0
        kinds = faults_of(capsys.readouterr().out)
        assert set(kinds) == ({kind} if kind else set()) and (kind is None or line in kinds[kind])


@pytest.mark.slow
def test_classes(tmp_path: Path, capsys) -> None:
    for n in range(24):
        folder = tmp_path / "images" / ("val" if n % 6 > 3 else "train") / ("cat" if n % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        photo(n).save(folder / f"{n}.png")
    overrides = ["task=classification", "data=image_folder", f"data.root={tmp_path / 'images'}", f"runs={tmp_path}"]
    assert vlm(["check-data", *overrides]) == 0
    assert faults_of(capsys.readouterr().out) == {}
    shutil.copy(tmp_path / "images" / "train" / "cat" / "1.png", tmp_path / "images" / "train" / "dog" / "1.png")
    shutil.copy(tmp_path / "images" / "train" / "dog" / "2.png", tmp_path / "images" / "val" / "dog" / "2.png")
    (tmp_path / "images" / "val" / "dog" / "bad.png").write_bytes(b"no image")
    assert vlm(["check-data", *overrides]) == 1
    kinds = faults_of(capsys.readouterr().out)
    assert kinds.keys() == {"unreadable image", "duplicate image", "image in two splits", "one image in two classes"}


@pytest.mark.slow
def test_names_send_no_commands_to_a_terminal(tmp_path: Path, capsys) -> None:
    for name in ("red\x1b[31m", "blue"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"a\x1b[2J{name}.png").write_bytes(b"no image")
        Image.new("RGB", (40, 40), name[:4].strip("\x1b")).save(tmp_path / name / "b.png")
    vlm(["check-data", "task=classification", "data=image_folder", f"data.root={tmp_path}", "data.image_size=32"])
    said = capsys.readouterr()
    assert r"\x1b[2J" in said.out + said.err and (said.out + said.err).replace("\n", "").isprintable()


@pytest.mark.slow
def test_text(tmp_path: Path, capsys) -> None:
    for split, count in (("train", 6), ("val", 2)):
        (tmp_path / "text" / split).mkdir(parents=True)
        for n in range(count):
            (tmp_path / "text" / split / f"{n}.txt").write_text(f"Text {n} of {split}.\n" * 5)
    overrides = ["task=language_modeling", "data=text", f"data.root={tmp_path / 'text'}", f"runs={tmp_path}"]
    assert vlm(["check-data", *overrides]) == 0
    assert faults_of(capsys.readouterr().out) == {}
    shutil.copy(tmp_path / "text" / "train" / "0.txt", tmp_path / "text" / "train" / "9.txt")
    shutil.copy(tmp_path / "text" / "train" / "1.txt", tmp_path / "text" / "val" / "9.txt")
    (tmp_path / "text" / "train" / "8.txt").write_text("  \n")
    assert vlm(["check-data", *overrides]) == 1
    assert faults_of(capsys.readouterr().out).keys() == {
        "duplicate document",
        "document in two splits",
        "empty document",
    }


def test_likeness() -> None:
    image = photo(1, (200, 150))
    brighter = Image.fromarray(np.clip(np.asarray(image).astype(int) + 8, 0, 255).astype(np.uint8))
    prints = [hash_image(one) for one in (image, image.copy(), image.resize((150, 112)), brighter, photo(2))]
    assert find_exact_duplicates(prints) == [[0, 1]]
    assert {(0, 2), (0, 3), (1, 2), (1, 3)} <= set(find_near_duplicates(prints))
    assert not any(4 in pair for pair in find_near_duplicates(prints)) and find_near_duplicates([]) == []
    shapes = Shapes(
        seed=0, shapes=["circle", "cross"], colors=["red", "blue"], sizes=["small", "large"], max_objects=2,
        train_scenes=300, val_scenes=5, test_scenes=5, captions_per_image=1,
    )  # fmt: skip
    prints = [hash_image(record.image()) for record in shapes.split("train").records()]
    assert len({one.look for one in prints}) < 290  # the hashes alone would call some plain scenes the same
    assert len(find_near_duplicates(prints)) <= 2


@pytest.mark.slow
def test_wrong_use(tmp_path: Path, capsys) -> None:
    assert vlm(["check-data", "data=captions", f"data.root={tmp_path / 'none'}"]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_table_without_its_key_is_named(clean: Path, capsys) -> None:
    write(clean, rows_of())
    for command in ("check-data", "train"):
        assert vlm([command, str(clean / "captions.csv")]) == 2
        assert (
            f"for captions in this file, give data=captions data.path={clean / 'captions.csv'}"
            in capsys.readouterr().err
        )


@pytest.mark.slow
def test_the_last_line_says_what_training_does(clean: Path, capsys) -> None:
    rows = [[name, text, split.replace("test", "val")] for name, text, split in rows_of()]
    assert vlm(["check-data", *write(clean, rows)]) == 0
    plan = "training    trains on 32 samples, validates on 8, tests on 8 of val, because there is no test split"
    assert capsys.readouterr().out.splitlines()[-1] == plan
    (clean / "000.png").rename(clean / "000.PNG")
    overrides = write(clean, rows)
    assert vlm(["check-data", *overrides]) == 1
    said = capsys.readouterr().out
    assert f"1 of 40 images are missing, such as {clean / '000.png'}; {clean} has 000.PNG, so correct the names" in said
    assert said.splitlines()[-1].startswith(f"training    stops: {clean / 'captions.csv'}: 1 of 40 images are missing")
    assert vlm(["train", *overrides]) == 2
    assert "so correct the names in the file" in capsys.readouterr().err


@pytest.mark.slow
def test_boxes_are_counted_and_drawn(clean: Path, tmp_path: Path, capsys) -> None:
    rows = [
        [f"{n:03d}.png", "cat" if n % 4 else "dog", 5, 6, 40, 50 + n % 9, row[2]]
        for n, row in enumerate(rows_of()[::2])
    ]
    rows = [*rows[:38], *([row[0], "", "", "", "", "", row[6]] for row in rows[38:])]
    with (clean / "boxes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["image", "label", "left", "top", "right", "bottom", "split"], *rows])
    data = [
        "task=detection",
        "data=boxes",
        f"data.path={clean}/boxes.csv",
        "data.image_size=64",
        f"runs={tmp_path}/runs",
    ]
    assert vlm(["check-data", *data, "--out", str(tmp_path / "page")]) == 0
    said = capsys.readouterr().out
    assert (
        faults_of(said) == {}
        and "boxes       38 of 2 classes, 10 of dog to 28 of cat; 2 images without a box\n" in said
    )
    page = (tmp_path / "page" / "report.html").read_text()
    assert "cat 5 6 40 5" in page and page.count("<img") == 12 + 4 + 4
