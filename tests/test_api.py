"""The Python API: what a notebook user guesses, and that importing it costs nothing."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_checkpoints
import torch
from PIL import Image
from tiny_checkpoints import FILES, IMAGES, STORY

import vlm
from vlm.cli.main import run as command
from vlm.inference.tasks import TASKS

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "data" / "sample"
EXACT = {"device": "cpu", "precision": "fp32"}


def records(task: str) -> list[dict]:
    return json.loads((FILES / f"{task}.json").read_text())["records"]


def load(task: str) -> vlm.Model:
    return vlm.load(FILES / f"{task}.ckpt", **EXACT)


@pytest.fixture(scope="module")
def captioner() -> vlm.Model:
    return vlm.load(SAMPLE / "captioner.ckpt", **EXACT)


def test_importing_costs_nothing() -> None:
    """Without torch, and in a few milliseconds of the processor, the best of three."""
    program = """
import sys, time
before = set(sys.modules)
start = time.process_time()
import vlm
spent = time.process_time() - start
print(spent, len(set(sys.modules) - before), "torch" in sys.modules, "numpy" in sys.modules)
"""
    found = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    assert min(float(spent) for spent, *_ in found) < 0.02
    assert [libraries for _, _, *libraries in found] == [["False", "False"]] * 3


@pytest.mark.slow
def test_scores_need_no_torch() -> None:
    program = "import sys, vlm; vlm.score(['a b'], [['a b']]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_names_are_those_of_the_package() -> None:
    assert {*vlm.__all__} <= {*dir(vlm)} and all(hasattr(vlm, name) for name in vlm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'loda'"):
        getattr(vlm, "loda")  # noqa: B009
    assert (ROOT / "vlm" / "py.typed").exists()


def test_a_text_is_given_as_it_is_or_by_its_file_and_one_question_has_one_answer(tmp_path: Path) -> None:
    """That answers are those of the commands: `tests/inference/test_one_declaration.py`."""
    spans, (record,) = load("span_answering"), records("span_answering")
    (tmp_path / "story.txt").write_text(STORY)
    for text in (STORY, tmp_path / "story.txt"):
        answer = spans.answer(text, question=record["question"])
        assert (answer.text, answer.start) == (record["answer"], record["start"])
        assert answer.probability == pytest.approx(record["probability"], rel=1e-3)
    with pytest.raises(vlm.Error, match=r"question: missing; answer needs it"):
        load("image_questions").answer(IMAGES)


@pytest.mark.slow
def test_each_task_has_a_method_by_the_name_of_its_command() -> None:
    names = {one.name for task in TASKS.values() for one in task.commands}
    for name, task in TASKS.items():
        model, own = load(name), {one.name for one in task.commands}
        assert model.task == name and own <= {*dir(model)} and all(callable(getattr(model, one)) for one in own)
        assert not [one for one in names - own - {"chat"} if hasattr(model, one)]  # that one is a method of all
        assert not hasattr(model, "_x")
    assert {*TASKS} == {*tiny_checkpoints.TASKS, "embedding"}  # which is not trained


def test_images_come_as_paths_pictures_and_arrays_one_or_many(captioner: vlm.Model) -> None:
    path = SAMPLE / "test-0-000000.png"
    picture = Image.open(path)
    array = np.asarray(picture.convert("RGB"))
    expected = captioner.caption(path).text
    sources = [str(path), picture, array, array / 255.0, np.dstack([array, np.full(array.shape[:2], 255, np.uint8)])]
    assert [captioner.caption(one).text for one in sources] == [expected] * 5
    assert [one.text for one in captioner.caption(sources)] == [expected] * 5
    assert [one.text for one in captioner.caption(np.stack([array, array]))] == [expected] * 2
    whole = captioner.caption(SAMPLE)
    assert len(whole) == 6 and whole[0].text == expected
    assert captioner.caption([]) == []


@pytest.mark.parametrize(
    "ask, line",
    [
        (lambda model: model.caption("nothing.png"), "nothing.png: No such file"),
        (
            lambda model: model.caption(np.zeros((4, 4, 5))),
            r"images: an array \(4, 4, 5\) of float64 is not an image; give",
        ),
        (lambda model: model.caption(7), "images: a int is not an image; give a path"),
        (lambda model: model.caption([], baem=4), "baem: unknown to caption; did you mean beam?"),
        (lambda model: model.caption(SAMPLE, results=3), "--results 3 needs --beam 3 or more"),
        (lambda model: model.classify(SAMPLE), "classify: not supported for a model for captioning; use model.caption"),
        (lambda model: vlm.load("nothing.ckpt"), "nothing.ckpt: no such checkpoint; give a run's folder"),
        (lambda model: vlm.load(FILES / "tagging.ckpt", device="tpu"), "--device: 'tpu' is unknown; choose auto"),
        (lambda model: load("tagging").attention(SAMPLE), "attention: not supported for a model for tagging"),
        (
            lambda model: load("image_questions").attention(SAMPLE),
            "attention: not supported for a model for image_questions; load a captioner",
        ),
        (lambda model: vlm.train("optim.lrr=1"), "optim.lrr: unknown; did you mean lr?"),
        (lambda model: vlm.train(trainer={"max_epoch": 3}), "trainer.max_epoch: unknown; did you mean max_epochs?"),
        (lambda model: vlm.score("nothing.json", {}), "nothing.json: No such file"),
        (lambda model: vlm.score({"1": "a"}, {"2": ["a"]}), "results: has no caption of an image of references"),
    ],
)
def test_faults_are_errors_with_the_lines_of_the_commands(captioner: vlm.Model, ask, line: str) -> None:
    with pytest.raises(vlm.Error, match=line) as caught:
        ask(captioner)
    assert len(str(caught.value).split("\n")) <= 2


def test_the_module_is_plain_and_counts() -> None:
    model = vlm.load(SAMPLE / "captioner.ckpt", **EXACT)
    path = SAMPLE / "test-0-000000.png"
    before = model.caption(path).text
    module = model.module
    stored = torch.load(SAMPLE / "captioner.ckpt", weights_only=True)["state_dict"]
    assert type(module).__name__ == "VisionLanguageModel" and model.module is module
    assert {f"model.{name}" for name in module.state_dict()} == {name for name in stored if name.startswith("model.")}
    assert model.caption(path).text == before
    with torch.no_grad():
        module.decoder.token_embed.weight.zero_()
    assert model.caption(path).text != before


def test_attention_is_a_picture_that_a_notebook_shows(
    captioner: vlm.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = SAMPLE / "test-0-000000.png"
    picture = captioner.attention(path)
    assert picture.caption.text == captioner.caption(path).text
    picture.save(tmp_path / "one.png")
    options = ["-c", str(SAMPLE / "captioner.ckpt"), "--device", "cpu", "--precision", "fp32"]
    assert command(["caption", str(path), *options, "--attention", str(tmp_path / "all")]) == 0
    (drawn,) = (tmp_path / "all").iterdir()
    assert drawn.read_bytes() == (tmp_path / "one.png").read_bytes() == picture._repr_png_()
    shown: list = []
    monkeypatch.setattr(Image.Image, "show", lambda self: shown.append(self.size))
    picture.show()
    ipython = SimpleNamespace(display=SimpleNamespace(display=shown.append), get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    shell: object = None  # imported by another library
    picture.show()
    shell = SimpleNamespace(kernel=None)
    picture.show()
    size = Image.open(tmp_path / "one.png").size
    assert shown == [size, size, picture]


def test_scores_are_those_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captions = {7: "a red dog runs", 8: "two cats sleep on a sofa", 9: "a man rides a horse"}
    truths = {7: ["a red dog runs", "the dog is running"], 8: ["cats on a sofa", "two cats sleep"], 9: ["a horse"]}
    rows = [{"image_id": image, "caption": text} for image, text in captions.items()]
    notes = {"annotations": [{"image_id": n, "caption": text} for n, texts in truths.items() for text in texts]}
    files = [tmp_path / "results.json", tmp_path / "references.json"]
    for file, content in zip(files, (rows, notes), strict=True):
        file.write_text(json.dumps(content))
    assert command(["score", *map(str, files), "--no-java", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    forms = [files, (rows, notes), (captions, truths), ([*captions.values()], [*truths.values()])]
    for results, references in forms:
        found = vlm.score(results, references)
        assert found and found == {name: told[name] for name in found}


@pytest.mark.slow
def test_a_training_is_a_run_that_can_be_evaluated_and_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = vlm.train(
        "task=captioning",
        "debug=fast",
        model={"size": {"dim": 32, "num_heads": 2}},
        data={"source": {f"{split}_scenes": 24 for split in ("train", "val", "test")}, "num_workers": 0},
        trainer={"max_epochs": 1, "accelerator": "cpu"},
        callbacks={"progress": None},
    )
    assert run.folder.parent == Path("runs/captioning") and run.best == run.folder / "checkpoints" / "best.ckpt"
    (kept,) = run.folder.glob("evaluation/*/metrics.json")
    stored = json.loads(kept.read_text())
    scores = run.evaluate(kept.parent.name, device="cpu")
    assert scores and all(stored[f"{kept.parent.name}/{name}"] == pytest.approx(scores[name]) for name in scores)
    assert vlm.load(run, **EXACT).caption(SAMPLE / "test-0-000000.png").tokens is not None
    again = vlm.train("callbacks.progress=null", resume=run.folder, trainer={"max_epochs": 2})
    assert again.folder == run.folder
    assert "resuming" in capsys.readouterr().err


def test_the_page_is_current() -> None:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import api  # type: ignore[import-not-found]

        assert (ROOT / "docs" / "api.md").read_text() == api.page()
    finally:
        sys.path.remove(str(ROOT / "docs"))
        sys.modules.pop("api", None)


@pytest.mark.parametrize(
    ("task", "use", "options", "message"),
    [
        ("captioning", "caption", {"beam": 10**6}, r"beam: 1000000 is out of range, expected .*at most 1024"),
        ("captioning", "caption", {"beam": "4"}, r"beam: '4' is str, expected int"),
        ("captioning", "caption", {"ban": "red"}, r"ban: 'red' is str, expected list\[str\]"),  # else its letters
        ("captioning", "caption", {"batch_size": 0}, r"batch_size: 0 is out of range, expected int \(at least 1\)"),
        ("image_questions", "answer", {"question": 3}, r"question: 3 is int, expected str"),
        ("image_questions", "answer", {"question": ["a?", " "]}, r"question: is empty; give a question"),
        ("contrastive", "classify", {}, r"label: missing; name the classes"),
        ("text_classification", "classify", {}, r"a: this model reads pairs of texts"),
    ],
)
def test_values_that_an_option_does_not_take_are_refused(task, use, options, message) -> None:
    with pytest.raises(vlm.Error, match=message):
        getattr(load(task), use)("a" if task == "text_classification" else IMAGES[0], **options)
