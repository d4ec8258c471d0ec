"""The page that an evaluation leaves, and the comparison of several."""

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from PIL import Image
from sacrebleu.metrics import BLEU, CHRF

from vlm.checkpoint.load import read
from vlm.cli.main import run as vlm
from vlm.evaluation.report.content import Card, Cards, Confusion, Note, Pictures, Section, Table, Texts
from vlm.evaluation.report.evaluation import Evaluation, evaluation_page, nice_ticks, read_curves
from vlm.io import page

VOID = {"meta", "img", "br", "polyline", "circle", "line", "rect"}
ODD = "<b>&amp; \"quoted\" 'it' \U0001f600 狗"


class Reader(html.parser.HTMLParser):
    """Checks that tags close in order, and collects texts and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.texts.append(data)


def results() -> dict[str, float]:
    names = {"loss": 1.0, "loss@shuffled": 1.6, "loss@blank": 2.0, "bleu4": 0.3, "rouge_l": 0.5, "cider": 0.9}
    names |= {"cider@low": 0.8, "cider@high": 1.0, "cider@constant": 0.1, "cider@shuffled": 0.2, "exact_match": 0.1}
    return {f"test/{name}": value for name, value in (names | {"distinct": 0.6, "length_ratio": 0.9}).items()}


def caption_page(count: int = 30, caption: str = ODD) -> str:
    draw = np.random.default_rng(0)
    names = [f"image {n}" for n in range(count)]
    images = {name: Image.fromarray(draw.integers(0, 255, (90, 140, 3), np.uint8)) for name in names}
    kinds = ("Random captions", "Best captions", "Worst captions")
    cards = [Card(image=name, text=caption, lines=["CIDEr 0.10", name], references=["a", ODD]) for name in names[:8]]
    with TemporaryDirectory() as folder:
        run = Path(folder) / "photos" / "2026-01-01"
        run.mkdir(parents=True)
        rows = [f"{n},0,{3 - n / 100},{0.9 if n in (9, 99) else ''}\n" for n in range(200)]
        (run / "metrics.csv").write_text("".join(["step,epoch,train/loss,val/cider\n", *rows]))
        evaluation = Evaluation(
            task="captioning",
            title="Captioning: " + ODD, split="test", used=count, results=results(),
            sections=[Section(title, [Cards(cards)]) for title in kinds],
            headlines=("cider", "bleu4"), curves=("cider",), checkpoint=run / "checkpoints" / "best.ckpt",
        )  # fmt: skip
        return evaluation_page(evaluation, picture=images.get)


def class_page() -> str:
    cards = Cards([Card(image=f"{n}.png", text="cat 50%", lines=["right"]) for n in range(9)])
    parts = [Confusion([[6, 3], [0, 0]], ["cat", "dog"]), Table(["class", "accuracy"], [("cat", "70%"), ("dog", ODD)])]
    evaluation = Evaluation(
        task="captioning",
        title="Classification", split="val", used=9, results={"val/loss": 1.0, "val/accuracy": 0.7},
        sections=[Section("Classes", parts), Section("Random samples", [cards])],
    )  # fmt: skip
    return evaluation_page(evaluation, picture=lambda name: None)


def text_page() -> str:
    evaluation = Evaluation(
        task="captioning",
        title="Language", split="val", used=1,
        results={"val/loss": 1.0, "val/bits_per_byte": 1.4, "val/loss@sampled": 1.1},
        sections=[Section("Samples", [Texts(["To " + ODD]), Note(ODD), Pictures([(ODD, b"png")])])],
    )  # fmt: skip
    return evaluation_page(evaluation, picture=lambda name: None)


@pytest.mark.parametrize("made", [caption_page, class_page, text_page, lambda: caption_page(count=1)])
def test_pages_are_whole_and_need_no_network(made) -> None:
    text = made()
    found = Reader(text)
    assert all(address.startswith("data:image/") for address in found.addresses)
    assert not re.search(r"url\(|@import|<script", text)
    assert 'name="viewport"' in text and "max-width: 600px" in text and "prefers-color-scheme: dark" in text


def test_what_captions_say_is_shown_as_text() -> None:
    found = Reader(caption_page())
    assert found.texts.count(ODD) >= 24
    said = "".join(found.texts)
    parts = "0.800 to 1.000|best constant|looks at its image|Random captions|Best captions|val/cider"
    parts += "|test split, 30 samples, run photos/2026-01-01, checkpoint best.ckpt"
    assert all(part in said for part in parts.split("|"))
    assert len(found.addresses) == 24


def test_a_page_says_what_its_scores_are() -> None:
    bad = {**results(), "test/loss@shuffled": 1.001}
    made = evaluation_page(Evaluation(title="x", task="", split="test", used=2, results=bad), picture=lambda name: None)
    assert "hardly looks at its image" in made
    text = text_page()  # an estimate is no control, and one sample is one
    assert "controls" not in text and "an estimate of the same loss" in text and "val split, 1 sample<" in text
    assert "Curves" not in class_page()


def test_curves_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,epoch,train/loss,val/loss\n1,0,2.5,\n2,0,nan,1.5\n3,1,2.0,inf\n")
    assert read_curves(tmp_path / "metrics.csv") == {"train/loss": [(1, 2.5), (3, 2)], "val/loss": [(2, 1.5)]}
    assert read_curves(tmp_path / "none.csv") == {}
    assert nice_ticks(0, 1) == pytest.approx([0, 0.5, 1]) and nice_ticks(3, 3)


def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("needs a headless browser: chromium or chrome in the PATH")
    return found


PROBE = """<body style="margin:0"><iframe id="f" style="border:0;width:{width}px;height:900px" srcdoc="{text}"></iframe>
<script>document.getElementById("f").onload = function () {{
const d = this.contentDocument, left = x => Math.round(x.getBoundingClientRect().left);
const c = [...d.querySelectorAll(".card")].map(left);
document.title = JSON.stringify({{over: Math.max(0, d.documentElement.scrollWidth - {width}), columns: new Set(c).size,
broken: [...d.images].filter(i => i.complete && !i.naturalWidth).length, font: getComputedStyle(d.body).fontSize}});
document.body.innerHTML = ""; }}</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "columns"), [(390, 1), (600, 1), (1280, 4)])
def test_a_browser_shows_it_without_scrolling_sideways(width: int, columns: int, tmp_path: Path) -> None:
    long = caption_page(caption="averyveryverylongwordwithoutanyblank" * 9)
    text = html.escape(long, quote=True).replace("loading=&quot;lazy&quot;", "")
    (tmp_path / "probe.html").write_text(PROBE.format(width=width, text=text))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 800)},1000"]
    done = subprocess.run(
        [browser(), *options, f"file://{tmp_path / 'probe.html'}"], capture_output=True, text=True, timeout=180
    )
    found = json.loads(html.unescape(re.search("<title>(.*?)</title>", done.stdout)[1]))
    assert found == {"over": 0, "columns": columns, "broken": 0, "font": "16px"}


@pytest.mark.slow
def test_a_run_and_its_evaluation_have_pages(trained: Path, tmp_path: Path, capsys) -> None:
    text = (trained / "evaluation" / "test" / "report.html").read_text()
    assert "Curves of the run" in "".join(Reader(text).texts) and "data:image/png" in text
    metrics = json.loads((trained / "evaluation" / "test" / "metrics.json").read_text())
    for name in ("loss@shuffled", "loss@blank", "cider@low", "cider@high", "bleu4@low", "length_ratio", "novelty"):
        assert f"test/{name}" in metrics
    images = json.loads((trained / "evaluation" / "test" / "details.json").read_text())["images"]
    assert len(images) == 20
    assert {"caption", "references", "cider", "bleu4", "rouge_l", "loss"} <= images["test-0-000000"].keys()
    assert np.mean([row["cider"] for row in images.values()]) == pytest.approx(metrics["test/cider"])
    last = str(trained / "checkpoints" / "last.ckpt")
    assert vlm(["evaluate", "-c", last, "--out", str(tmp_path / "last"), "--device", "cpu"]) == 0
    assert "samples     20 used\n" in capsys.readouterr().out
    elsewhere = "".join(Reader((tmp_path / "last" / "report.html").read_text()).texts)
    assert "Curves of the run" in elsewhere and "checkpoint last.ckpt" in elsewhere
    out = tmp_path / "comparison.html"
    assert vlm(["compare", str(trained), str(tmp_path / "last"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "difference (95% interval)" in said and "CIDEr" in said
    Reader(out.read_text())


@pytest.mark.slow
def test_a_run_keeps_what_it_was_started_with(trained: Path, small: list[str]) -> None:
    for name in ("best", "last"):
        typed = read(trained / "checkpoints" / f"{name}.ckpt")["vlm"]["typed"]
        assert typed == [*small, "trainer.max_epochs=2", f"runs={trained.parents[1]}"]


def write_scores(folder: Path, task: str, scores: dict[str, float], **files: object) -> str:
    folder.mkdir(exist_ok=True)
    files |= {"metrics": {f"test/{name}": value for name, value in scores.items()}, "about": {"task": task}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


GOOD = {str(n): f"a dog number {n} runs" for n in range(40)}


def rows_of(captions: dict[str, str]) -> dict[str, dict]:
    return {n: {"caption": text, "references": [GOOD[n], f"dog {n}"]} for n, text in captions.items()}


def evaluation(folder: Path, captions: dict[str, str]) -> str:
    return write_scores(folder, "captioning", {"loss": 1.0, "cider": 0.5}, details={"images": rows_of(captions)})


def compare(folder: Path, capsys) -> dict[str, list[float]]:
    """The difference, and the ends of its interval, of each score of the evaluations `one` and `two`."""
    capsys.readouterr()
    assert vlm(["compare", str(folder / "one"), str(folder / "two")]) == 0
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()[1:]]
    return {line[0]: list(map(float, re.findall(r"[+-][\d.]+", line[3]))) for line in lines if "(" in line[-2]}


def test_a_better_run_is_significantly_so(tmp_path: Path, capsys) -> None:
    poor = {image: text if int(image) % 2 else "a cat" for image, text in GOOD.items()}
    folders = [evaluation(tmp_path / name, captions) for name, captions in (("one", poor), ("two", GOOD), ("x", poor))]
    assert vlm(["compare", *folders]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["one", "two"]
    row = next(line for line in lines if line.startswith("CIDEr"))
    first, second = re.findall(r"([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)(\*?)", row)
    assert float(first[0]) > 1 and first[3] == "*" and second == ("+0.0000", "+0.0000", "+0.0000", "")
    assert row.split()[-1] == "1.000"


def test_captions_are_compared_in_each_language_that_both_have(tmp_path: Path, capsys) -> None:
    poor = dict.fromkeys(GOOD, "a cat")
    plain, folders = evaluation(tmp_path / "plain", poor), []
    for name, languages in {"one": {"en": GOOD, "de": poor}, "two": {"de": GOOD}}.items():
        scores = {"cider": 0.5} | {f"cider_{language}": 0.5 for language in languages}
        details = {language: rows_of(captions) for language, captions in languages.items()}
        folders.append(write_scores(tmp_path / name, "captioning", scores, details=details))
    assert vlm(["compare", *folders]) == 0
    printed = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert re.search(r"\+\d.\d+ \(\+[\d.]+ to \+[\d.]+\)\*", printed["cider de"])
    assert "(" not in printed["CIDEr"] and "(" not in printed["cider en"]
    assert vlm(["compare", folders[0], plain]) == 0
    warned = "warning: only one of one and plain has captions in an unnamed language, de, en, which are not compared"
    assert capsys.readouterr().err == f"{warned}\n"


def label_rows(right: int, rows: list[dict]) -> list[dict]:
    return [row | {"label": "a", "answer": "a", "predicted": "a" if n < right else "b"} for n, row in enumerate(rows)]


TEXTS = [{"id": f"line {n}"} for n in range(200)]
PHOTOS = [{"image_id": f"{n}.png"} for n in range(60)]  # of each, four questions are right or none: no more than one is


@pytest.mark.parametrize(
    ("task", "rights", "rows", "tolerance"),
    [("text_classification", (100, 130), TEXTS, 0.015), ("image_questions", (20, 35), PHOTOS, 0.03)],
)
def test_each_kind_is_compared_by_what_is_drawn(task, rights, rows, tolerance, tmp_path: Path, capsys) -> None:
    """Texts are, and images of which there are several questions; the one is right of some, the other of more."""
    for name, right in zip(("one", "two"), rights, strict=True):
        own = label_rows(right, rows)
        asked = [row | {"question": f"question {number}?"} for row in own for number in range(4)]
        write_scores(
            tmp_path / name, task, {"accuracy": right / len(rows)}, predictions=own, details={"questions": asked}
        )
    share = (rights[1] - rights[0]) / len(rows)
    spread = 1.96 * (share * (1 - share) / len(rows)) ** 0.5
    gain, *ends = compare(tmp_path, capsys)["accuracy"]
    assert gain == share and ends == pytest.approx([share - spread, share + spread], abs=tolerance)


def test_answers_are_compared_question_by_question(tmp_path: Path, capsys) -> None:
    """F1 of each question is the same plus 0.1, so that the gain has no spread."""
    scores = np.random.default_rng(0).uniform(0, 0.9, 50)
    for name, gain in (("one", 0.0), ("two", 0.1)):
        rows = [{"id": f"q{n}", "exact_match": 0.0, "f1": f1 + gain} for n, f1 in enumerate(scores)]
        write_scores(tmp_path / name, "span_answering", {"f1": scores.mean() + gain}, details={"questions": rows})
    assert compare(tmp_path, capsys)["F1"] == [0.1, 0.1, 0.1]


def test_tags_are_compared_sentence_by_sentence(tmp_path: Path, capsys) -> None:
    """Of 60 sentences one finds a name in the first 20, the other in the first 40; of two words each, one is O."""
    tags = ["B-PER", "O"]
    for name, found in (("one", 20), ("two", 40)):
        rows = [{"id": f"{n}", "words": ["Ada", "ran"], "tags": tags} for n in range(60)]
        rows = [row | {"predicted": tags if n < found else ["O", "O"]} for n, row in enumerate(rows)]
        f1 = 2 * found / (found + 60)
        write_scores(tmp_path / name, "tagging", {"word_accuracy": 0.5 + found / 120, "span_f1": f1}, predictions=rows)
    gains = compare(tmp_path, capsys)
    spread = 1.96 * (1 / 3 * 2 / 3 / 60) ** 0.5 / 2  # of half the share of sentences that the other has and one lacks
    assert gains["word accuracy"] == pytest.approx([1 / 6, 1 / 6 - spread, 1 / 6 + spread], abs=0.012)
    assert gains["span F1"][0] == pytest.approx(0.8 - 0.5, abs=1e-4) and gains["span F1"][1] > 0.15
    other = json.loads((tmp_path / "two" / "predictions.json").read_text())
    other[7]["tags"] = ["O", "O"]
    (tmp_path / "two" / "predictions.json").write_text(json.dumps(other))
    assert vlm(["compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "7: has other references in the two evaluations" in capsys.readouterr().err


def test_translations_are_compared_as_sacrebleu_scores_them(tmp_path: Path, capsys) -> None:
    rng = np.random.default_rng(0)
    references = [" ".join(rng.choice(["ein", "Hund", "rennt", "am", "Strand", "."], 8)) for _ in range(50)]
    worse = [text.replace("Hund", "Katze") if n % 2 else text.replace("am", "im") for n, text in enumerate(references)]
    better = [text if n % 3 else written for n, (text, written) in enumerate(zip(references, worse, strict=True))]
    truth = []
    for name, written in (("one", worse), ("two", better)):
        rows = zip(written, references, strict=True)
        texts = {f"{n}": {"text": "x", "translation": one, "reference": other} for n, (one, other) in enumerate(rows)}
        scores = [metric.corpus_score(written, [references]).score for metric in (BLEU(), CHRF())]
        named = dict(zip(("bleu", "chrf"), scores, strict=True))
        write_scores(tmp_path / name, "translation", named, details={"texts": texts})
        truth.append(scores)
    gains = compare(tmp_path, capsys)
    for name, first, second in zip(("BLEU", "chrF"), *truth, strict=True):
        assert gains[name][0] == pytest.approx(second - first, abs=1e-3) and gains[name][1] > 0


def test_images_that_find_texts_are_compared_by_the_rank_of_their_own(tmp_path: Path, capsys) -> None:
    for name, rank in (("one", 6), ("two", 5)):
        rows = [{"image_id": f"{n}.png", "caption": "a", "rank": rank} for n in range(9)]
        recalls = {"text_recall_1": 0.0, "text_recall_5": float(rank == 5), "text_recall_10": 1.0, "recall": 0.5}
        write_scores(tmp_path / name, "contrastive", recalls, predictions=rows)
    gains = compare(tmp_path, capsys)
    assert [values for name, values in gains.items()] == [[0.0] * 3, [1.0] * 3, [0.0] * 3]


def test_what_cannot_be_compared_is_a_line(tmp_path: Path, capsys) -> None:
    one, other = (evaluation(tmp_path / name, dict.fromkeys(GOOD, "a")) for name in ("one", "two\x1b[31m"))
    rows = [{"image": "x.png", "label": "a", "predicted": "a"}]
    classes = write_scores(tmp_path / "classes", "classification", {"loss": 1.0}, predictions=rows)
    rows = [{"image": "y.png", "label": "a", "predicted": "a"}]
    others = write_scores(tmp_path / "others", "classification", {"loss": 1.0}, predictions=rows)
    texts = [write_scores(tmp_path / name, "language_modeling", {name: 1.0}) for name in ("bits_per_byte", "bleu")]
    metrics = tmp_path / "one" / "metrics.json"
    before = metrics.read_bytes()
    for arguments, status, said in (
        ([one, classes], 1, "error: one: is of the task captioning, and classes of classification; compare runs of"),
        ([classes, one], 1, "error: classes: is of the task classification, and one of captioning; compare runs of"),
        ([classes, others], 1, "no sample in common"),
        (texts, 1, "error: bits_per_byte and bleu: no score in common; compare evaluations of one task\n"),
        ([one], 2, "needs at least two runs: vlm compare RUN OTHER_RUN"),
        ([one, str(tmp_path)], 2, "holds no metrics.json"),
        ([one, other, "--out", str(metrics)], 2, "is also an input"),
    ):
        assert vlm(["compare", *arguments]) == status
        captured = capsys.readouterr()
        assert said in captured.err and captured.out == ""
    assert metrics.read_bytes() == before
    assert vlm(["compare", one, other]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_thumbnails_are_small_and_escaped() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (1200, 1600, 3), np.uint8))
    assert len(page.thumbnail(noise)) < 120_000 and page.thumbnail(noise).startswith("data:image/jpeg")
    assert page.thumbnail(Image.new("RGB", (64, 64))).startswith("data:image/png")
    assert "<script>" not in page.card(None, "<script>", ["<script>"], ["<script>", "<script>"])
