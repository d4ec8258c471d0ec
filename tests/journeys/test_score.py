"""`vlm score`: COCO's metrics of two files, to the digit, with nothing dropped in silence."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import sacrebleu

from vlm.cli.main import run as vlm

ROOT = Path(__file__).parents[2]
GOLD = Path(os.environ.get("VLM_SHARED_DATA", ROOT.parent / "shared" / "data")) / "coco_caption_gold"
KEYS = ["bleu1", "bleu2", "bleu3", "bleu4", "rouge_l", "cider"]

CAPTIONS = {7: "a red dog runs", 8: "two cats sleep on a sofa", 9: "a man rides a horse"}
REFERENCES = {7: ["a red dog runs", "the dog is running"], 8: ["cats on a sofa", "two cats sleep"], 9: ["a horse"]}


def flat(scores: dict) -> dict[str, float]:
    bleu = {f"bleu{n}": value for n, value in enumerate(scores["Bleu"], 1)}
    return bleu | {"rouge_l": scores["ROUGE_L"], "cider": scores["CIDEr"]}


def files(folder: Path, captions=CAPTIONS, references=REFERENCES) -> list[str]:
    results = [{"image_id": image, "caption": text} for image, text in captions.items()]
    notes = [{"image_id": image, "id": 0, "caption": text} for image, texts in references.items() for text in texts]
    whole = {"images": [{"id": image} for image in references], "annotations": notes}
    return write_files(folder, results=results, references=whole)


def write_files(folder: Path, **contents: object) -> list[str]:
    for name, content in contents.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / f"{name}.json").write_text(text)
    return [str(folder / f"{name}.json") for name in contents]


def scores(capsys, *arguments: str, status: int = 0) -> dict:
    assert vlm(["score", *arguments, "--format", "json", "--no-java"]) == status
    return json.loads(capsys.readouterr().out)


needs_gold = pytest.mark.skipif(not GOLD.is_dir(), reason="needs the COCO demonstration (set VLM_SHARED_DATA)")


@pytest.mark.slow
@needs_gold
def test_equals_the_published_scores_overall_and_for_every_image(capsys) -> None:
    found = scores(capsys, str(GOLD / "results.json"), str(GOLD / "references.json"), "--per-image")
    published = json.loads((GOLD / "scores.json").read_text())
    assert {key: found[key] for key in KEYS} == pytest.approx(flat(published["full_precision"]), abs=1e-6)
    assert (found["cider"], found["rouge_l"]) == pytest.approx((0.5997905, 0.3962527), abs=1e-6)
    assert found["images"] == 1000 and found["without_caption"] == found["without_reference"] == []
    assert found["per_image"].keys() == published["per_image"].keys()
    for image, row in published["per_image"].items():
        assert found["per_image"][image] == pytest.approx(flat(row), abs=1e-6)


@pytest.mark.slow
@needs_gold
@pytest.mark.skipif(not (find_spec("pycocoevalcap") and shutil.which("java")), reason="needs vlm-lightning[coco], java")
def test_meteor_is_the_published_one(capsys) -> None:
    arguments = [str(GOLD / "results.json"), str(GOLD / "references.json"), "--format", "json", "--per-image"]
    assert vlm(["score", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    published = json.loads((GOLD / "scores.json").read_text())["published"]["METEOR"]
    assert found["meteor"] == pytest.approx(published, abs=5e-4)
    assert len({row["meteor"] for row in found["per_image"].values()}) > 500


@pytest.mark.parametrize("form", ["text", "csv", "json"])
def test_one_image_has_no_cider(form, tmp_path, capsys) -> None:
    """Its weights are the logarithm of one image over one: 0 for the right caption, too."""
    given = files(tmp_path, {7: CAPTIONS[7]}, {7: REFERENCES[7]})
    assert vlm(["score", *given, "--format", form, "--per-image", "--no-java"]) == 0
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert "--references-of FILE" in said and "bleu4" in said and "rouge_l" in said
    assert not re.search(r"cider\W+0", said) and "cider," not in said


def test_the_weights_of_a_larger_set(tmp_path, capsys) -> None:
    """The score of an image among the references of all is the one that it has where all are scored."""
    whole = scores(capsys, *files(tmp_path), "--per-image")
    larger = tmp_path / "all.json"
    (tmp_path / "references.json").rename(larger)
    few = files(tmp_path, {7: CAPTIONS[7]}, {7: REFERENCES[7]})
    found = scores(capsys, *few, "--references-of", str(larger))
    assert found["cider"] == pytest.approx(whole["per_image"]["7"]["cider"], rel=1e-12) and found["cider"] > 1
    assert {key: found[key] for key in KEYS[:5]} == {key: whole["per_image"]["7"][key] for key in KEYS[:5]}


def test_the_three_forms_agree(tmp_path, capsys) -> None:
    given = files(tmp_path)
    found = scores(capsys, *given, "--per-image")
    assert list(found)[:6] == KEYS and found["images"] == 3
    rows = json.loads(Path(given[0]).read_text())  # lines of JSON are read too
    (tmp_path / "step_9.jsonl").write_text("".join(json.dumps({**row, "loss": 1.0}) + "\n" for row in rows))
    assert scores(capsys, str(tmp_path / "step_9.jsonl"), given[1], "--per-image") == found
    assert vlm(["score", *given, "--per-image", "--format", "csv", "--no-java"]) == 0
    rows = {row.pop("image"): row for row in csv.DictReader(capsys.readouterr().out.splitlines())}
    assert {i: {k: float(v) for k, v in row.items()} for i, row in rows.items()} == found["per_image"]
    assert vlm(["score", *given, "--format", "csv", "--no-java"]) == 0
    (whole,) = csv.DictReader(capsys.readouterr().out.splitlines())
    assert {key: float(value) for key, value in whole.items()} == {key: found[key] for key in KEYS}
    assert vlm(["score", *given, "--no-java", "--per-image"]) == 0
    said = capsys.readouterr().out
    assert f"cider     {found['cider']:>10.4f}" in said and "\n7\t1.0000" in said
    assert vlm(["score", *given, "--no-java", "--out", str(tmp_path / "scores.txt")]) == 0
    assert (tmp_path / "scores.txt").read_text() == said[: said.index("\nimage\t")]


def test_what_is_missing_is_named_and_counted(tmp_path, capsys) -> None:
    captions = {7: CAPTIONS[7], 8: CAPTIONS[8], 5: "nobody wrote of this", "x": "nor of this"}
    references = {**REFERENCES, 4: []}
    assert vlm(["score", *files(tmp_path, captions, references), "--format", "json", "--no-java"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["images"] == 2 and found["without_caption"] == ["9"]
    assert found["without_reference"] == ["4", "5", "x"]
    for said in ("image 9: no caption in", "image 5: no reference in", "1 image without a caption", "3 images without"):
        assert said in captured.err
    alone = {image: CAPTIONS[image] for image in (7, 8)}, {image: REFERENCES[image] for image in (7, 8)}
    again = scores(capsys, *files(tmp_path, *alone))
    assert {key: again[key] for key in KEYS} == {key: found[key] for key in KEYS}
    given = files(tmp_path, references={**REFERENCES, **{1000 + n: ["a dog"] for n in range(50)}})
    assert vlm(["score", *given, "--no-java"]) == 1
    errors = capsys.readouterr().err.splitlines()  # many are counted in one line
    assert len(errors) == 11 and "50 images without a caption" in errors[-1] and "40 more" in errors[-1]


RESULT = [{"image_id": 1, "caption": "a"}]


@pytest.mark.parametrize(
    ("results", "references", "said"),
    [
        ("{", "[]", "not JSON"),
        ({"annotations": []}, {"annotations": []}, "has no COCO results"),
        (RESULT, {"images": []}, "has no COCO annotations"),
        (RESULT, {"annotations": [{"image_id": 1}]}, "entry 0"),
        (RESULT, {"annotations": [], "images": [3]}, "has no id"),
        ([*RESULT, {"image_id": 1, "caption": "b"}], {"annotations": RESULT}, "image 1 has more than one caption"),
        (RESULT, {"annotations": [{"image_id": 2, "caption": "a"}]}, "do their image ids agree"),
    ],
)
def test_other_files_are_refused_in_a_line(results, references, said, tmp_path, capsys) -> None:
    given = write_files(tmp_path, results=results, references=references)
    assert vlm(["score", *given, "--no-java"]) in (1, 2)
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == "" and len(captured.err.splitlines()) == 1


def test_files_that_are_read_are_not_written_over_and_ids_send_no_commands(tmp_path, capsys) -> None:
    odd = "\x1b[2J\nerror: forged"
    given = files(tmp_path, {**CAPTIONS, odd: "a dog"}, {**REFERENCES, f"{odd}2": ["a dog"]})
    before = [Path(path).read_bytes() for path in given]
    for path in given:
        assert vlm(["score", *given, "--no-java", "--out", path]) == 2
        assert "is also an input" in capsys.readouterr().err
    assert [Path(path).read_bytes() for path in given] == before
    assert vlm(["score", *given, "--no-java"]) == 1
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert not [line for line in captured.err.splitlines() if line.startswith("error: forged")]


def test_absent_metrics_say_why(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("vlm.evaluation.score.find_spec", lambda name: None)
    assert vlm(["score", *files(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in ("meteor", "spice"):
        assert f'{name:<10}{"absent":>10}  needs pip install "vlm-lightning[coco]" and Java' in said


def texts(folder: Path, written: str, wanted: str) -> list[str]:
    """Files of lines of text and of a reference to each, as translations and summaries are scored."""
    for name, text in (("written.txt", written), ("wanted.txt", wanted)):
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / "written.txt"), str(folder / "wanted.txt")]


def test_texts_are_scored_by_line(tmp_path, capsys) -> None:
    given = texts(tmp_path, "a red dog runs\n\ntwo cats\n", "a red dog runs\r\nnothing\r\ntwo cats sleep\r\n")
    assert vlm(["score", *given, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rouge1"], found["rougeL"], found["exact_match"]) == pytest.approx((1.8 / 3, 1.8 / 3, 1 / 3))
    assert found["texts"] == 3 and found["bleu@low"] <= found["bleu"] <= found["bleu@high"]
    assert vlm(["score", *given]) == 0
    assert re.search(r"rouge1 +0\.6000 .*\nrouge2 ", capsys.readouterr().out)


@pytest.mark.parametrize("inner", ["\r", "\u2028", "\x85", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line(inner, tmp_path, capsys) -> None:
    """As in sacrebleu and other tools; Python's text files also split at a lone carriage return."""
    one, other = [f"a b{inner}c d e f", "x y z w"], [f"a b{inner}c d e g", "x y z w"]
    for name, lines in (("written.txt", one), ("wanted.txt", other)):
        (tmp_path / name).write_bytes(("\n".join(lines) + "\n").encode())
    assert vlm(["score", str(tmp_path / "written.txt"), str(tmp_path / "wanted.txt"), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["texts"] == 2
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(one, [other]).score)
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(one, [other]).score)


def test_texts_that_cannot_be_scored_are_refused(tmp_path, capsys) -> None:
    for wanted, more, said in (
        ("a\nb\n", [], "has 1 lines, and .*wanted.txt 2; give one text per line"),
        ("", [], "wanted.txt: is empty"),
        ("a\n", ["--per-image"], "contains lines of text; --per-image"),
        ("a\n", ["--format", "xml"], "--format: 'xml' is unknown"),
    ):
        assert vlm(["score", *texts(tmp_path, "a\n", wanted), *more]) == 2
        assert re.search(said, capsys.readouterr().err)


@pytest.mark.slow
def test_scoring_loads_no_torch(tmp_path) -> None:
    code = "import sys; from vlm.cli.main import run; status = run(['score', *sys.argv[1:], '--no-java'])"
    code += "; assert status == 0 and 'torch' not in sys.modules"
    for arguments in (files(tmp_path), texts(tmp_path, "a\nb\n", "a\nb\n")):
        subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=ROOT)


CHINESE = {7: "一只狗在草地上跑", 8: "两只猫在沙发上睡觉"}


@pytest.mark.parametrize("form", ["text", "json", "csv"])
@pytest.mark.parametrize("captions", [CAPTIONS, CHINESE])
def test_scores_by_characters_say_so_in_every_form(captions, form, tmp_path, capsys) -> None:
    names = files(tmp_path, captions, {image: [text] for image, text in captions.items()})
    assert vlm(["score", *names, "--no-java", "--format", form]) == 0
    said, spaceless = "".join(capsys.readouterr()), captions is CHINESE
    if form == "json":
        assert json.loads(said)["units"] == ("characters" if spaceless else "words")
    assert ("by characters" in said) == (spaceless and form != "json")
