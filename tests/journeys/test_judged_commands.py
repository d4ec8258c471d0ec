"""Commands of the README and of the pages whose answers can be judged, with the model that the page trains."""

import json
import re
import shlex
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import COMMANDS, PAGES, ROOT
from journey import only_run

from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

SAMPLE = ROOT / "data" / "sample"
USES = re.compile(r"vlm (caption|classify|translate|tag|answer|fill|retrieve|generate|predict) ")
# The page's own training, how its run is named, and the score on test that it is to reach.
TRAININGS = {
    "classification": ("accuracy", 0.95),
    "contrastive": ("text_recall_1", 0.9),
    "image_questions": ("accuracy", 0.95),
    "masked_language_modeling": ("accuracy", 0.45),
    "photo_translation": ("exact_match", 0.5),
    "span_answering": ("exact_match", 0.9),
    "tagging": ("word_accuracy", 0.99),
    "text_classification": ("accuracy", 0.93),
    "translation": ("exact_match", 0.98),
}
SHORT = ("tagging",)  # a training of 20 s of a core; the others are judged nightly
# Commands that no data of ours have an answer to.
UNJUDGED = {
    "a file of the reader": r"my_photos|photos |photo\.jpg|letters\.txt|scans|data/shards",
    "a model of others": r"-c (FOLDER|smolvlm|paligemma|opus-mt|t5-small|trocr|smollm2)",
    "a training of five minutes, of which data/sample/captioner.ckpt is one": r"-c runs/captioning",
    "sampled text": "vlm generate",
}


def true_captions() -> dict[str, set[str]]:
    """The true captions of each image of data/sample, by file name."""
    content = json.loads((SAMPLE / "captions.json").read_text())
    names = {image["id"]: image["file_name"] for image in content["images"]}
    captions = defaultdict(set)
    for annotation in content["annotations"]:
        captions[names[annotation["image_id"]]].add(annotation["caption"])
    return dict(captions)


TRUE = true_captions()


def rows(text: str) -> list[list[str]]:
    """The columns of each line; paths without their folder."""
    return [[column.removeprefix("data/sample/") for column in line.split("\t")] for line in text.splitlines()]


def judge_captions(text: str) -> None:
    first: dict[str, str] = {}
    for row in [list(json.loads(line).values()) for line in text.splitlines()] if text[0] == "{" else rows(text):
        first.setdefault(Path(row[0]).name, row[2] if len(row) > 2 else row[1])
    assert first and all(caption in TRUE[name] for name, caption in first.items()), first


def most_probable(classes: str) -> str:
    """The first of the classes with probabilities that a line ends with: red circle 0.9753  red cross 0.0145."""
    return classes.split("  ")[0].rsplit(" ", 1)[0]


def judge_classes(text: str) -> None:
    """The most probable class of each image of a single object."""
    found = {name: most_probable(classes) for name, classes in rows(text)}
    alone = {name: captions for name, captions in TRUE.items() if len(captions) == 1}
    assert alone and all({f"a large {found[name]}"} == captions for name, captions in alone.items()), text


def judge_labels(text: str) -> None:
    """The most probable label of each image that one of the labels is a caption of."""
    found = {name: most_probable(labels) for name, labels in rows(text)}
    labels = set(re.findall(r"a large red circle|a small blue cross below a small red circle", text))
    judged = {name: captions & labels for name, captions in TRUE.items() if captions & labels}
    assert len(labels) == 2 and len(judged) == 3, text
    assert all({found[name]} == captions for name, captions in judged.items()), text


def judge_presence(text: str) -> None:
    """Whether there is a red circle in each image."""
    there = {
        name: "yes" if any("red circle" in caption for caption in captions) else "no" for name, captions in TRUE.items()
    }
    assert {name: answer for name, _, answer, *_ in rows(text)} == there, text


def judge_first_image(text: str) -> None:
    query, image, _ = rows(text)[0]
    assert query in TRUE[image], text


def equals(expected: str) -> Callable[[str], None]:
    """Judges an answer that is printed alone, or in the last column."""

    def judge(text: str) -> None:
        ((*_, answer),) = rows(text)
        assert answer == expected

    return judge


def names(*expected: str) -> Callable[[str], None]:
    """Judges the words before probabilities, such as the class of a text, or words for a gap in any order."""

    def judge(text: str) -> None:
        ((*_, answer),) = rows(text)
        assert sorted(re.findall(r"([a-z]+) [01]\.\d+", answer)) == sorted(expected), text

    return judge


ROLES = "a/O large/B-subject red/I-subject circle/I-subject left/B-relation of/I-relation a/O small/B-landmark "
# Each command that can be judged, by a part of it that no other has.
JUDGED: dict[str, Callable[[str], None]] = {
    "vlm caption data/sample": judge_captions,
    "vlm classify data/sample -c runs/classification": judge_classes,
    "vlm classify data/sample -c runs/contrastive": judge_labels,
    "vlm retrieve data/sample": judge_first_image,
    "vlm answer data/sample": judge_presence,
    "vlm answer notes.txt": equals("small red circle"),
    'vlm translate --text "a red circle left of a blue cross"': equals("ein roter Kreis links von einem blauen Kreuz"),
    'vlm translate --text "you can see a small green diamond"': equals("man kann eine kleine grüne Raute sehen"),
    'vlm translate --text "a large colored circle"': equals("ein großer roter Kreis"),
    "vlm tag --text": equals(f"{ROLES}blue/I-landmark cross/I-landmark"),
    "vlm classify --text": names("same"),
    "vlm fill": names("left", "right"),
}


def judge_of(command: str) -> Callable[[str], None] | None:
    if any(re.search(why, command) for why in UNJUDGED.values()):
        return None
    return next((judge for part, judge in JUDGED.items() if command.startswith(part)), None)


def marks(command: str) -> pytest.MarkDecorator:
    (run,) = re.findall(r"runs/(\w+)|$", command)[:1]
    return pytest.mark.nightly if run in TRAININGS and run not in SHORT else pytest.mark.slow


USED = [command for command in COMMANDS if USES.match(command)]
ANSWERED = [command for command in USED if judge_of(command)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains a task as its page does, once for all tests."""
    finished: dict[str, Path] = {}

    def train(task: str) -> Path:
        if task not in finished:
            runs = tmp_path_factory.mktemp("judged")
            assert main([f"task={task}", "trainer=cpu", f"runs={runs}"]) == 0
            finished[task] = only_run(runs)
        return finished[task]

    return train


def test_each_command_is_judged_or_has_a_reason_not_to_be() -> None:
    assert len(ANSWERED) >= 15
    reasons = "|".join(UNJUDGED.values())
    assert [command for command in USED if not judge_of(command) and not re.search(reasons, command)] == []
    assert [part for part in JUDGED if not any(command.startswith(part) for command in USED)] == []


@pytest.mark.parametrize(
    "command", [pytest.param(command, marks=marks(command), id=command.partition(" -c ")[0]) for command in ANSWERED]
)
def test_the_answer_is_right(command, trained, tmp_path, monkeypatch, capsys) -> None:
    for task in set(re.findall(r"runs/(\w+)/DATE_TIME", command)):
        (tmp_path / "runs" / task).mkdir(parents=True)
        (tmp_path / "runs" / task / "DATE_TIME").symlink_to(trained(task))
    shutil.copytree(SAMPLE, tmp_path / "data" / "sample")
    for line in re.findall(r'^echo "(.*)" > notes\.txt$', "\n".join(page.read_text() for page in PAGES), re.MULTILINE):
        (tmp_path / "notes.txt").write_text(line)
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    assert vlm(shlex.split(command, comments=True)[1:]) == 0
    judge, text = judge_of(command), capsys.readouterr().out
    assert judge is not None and text
    judge(text)


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=pytest.mark.slow if task in SHORT else pytest.mark.nightly) for task in TRAININGS]
)
def test_the_training_of_the_page_reaches_its_score(task, trained) -> None:
    run = trained(task)
    scores = json.loads((run / "evaluation" / "test" / "metrics.json").read_text())
    metric, least = TRAININGS[task]
    assert scores[f"test/{metric}"] >= least
    others = {name.partition("@")[2]: value for name, value in scores.items() if name.startswith(f"test/{metric}@")}
    baselines = [value for name, value in others.items() if name not in ("low", "high", "ceiling")]
    assert all(scores[f"test/{metric}"] > value + 0.2 for value in baselines)
