"""What holds for every task and for its other models, those before the transformer.

One task is tested in any run of the tests. Of the others and of the other models, each test has some in a slow run and
all in a nightly run.
"""

import copy
import html
import io
import re
import shlex
import signal
from contextlib import ExitStack, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from journey import best, interrupt_at, only_run, results, same_weights
from predictions import predict_inputs
from small import MODELS, TASKS, command, task_of

from vlm.checkpoint.load import load_model, read
from vlm.checkpoint.rebuild import convert_errors
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.errors import UserError
from vlm.evaluation.report.content import CONTROLS, TITLES
from vlm.training.config.check import check
from vlm.training.run.build import build_data, build_model, build_task
from vlm.training.run.evaluate import evaluate_checkpoint
from vlm.training.run.fit import main

EACH = ["tagging", *(name for name in [*TASKS, *MODELS] if name != "tagging")]  # the first is tested in any run
CPU = ["--device", "cpu"]
OWN = {"captioning": ["data.source.captions_per_image=1", "optim.lr=1e-2"], "language_modeling": ["data.max_len=32"]}
OWN["contrastive"] = ["data.source.captions_per_image=null", "task.label_smoothing=0"]  # of the first valid caption
LONGER = ["trainer.max_epochs=600", "trainer.check_val_every_n_epoch=600"]  # other words are masked in every epoch
OWN["detection"] = ["task.fields.boxes.named=0", "data.augment.min_scale=1.0", "data.augment.horizontal_flip=false"]
OWN["detection"] += [*LONGER, "data.source.max_objects=2", "data.source.object_weights=[1,1]"]  # in any order
OWN["classification"] = ["task.mixup=0", "task.cutmix=0", "data.augment.min_scale=1.0"]
OWN["classification"] += ["data.augment.horizontal_flip=false"]
STORED = {"preferences": "captioning"}  # tasks whose checkpoints are those of another one
RECURRENT = ("lstm", "seq2seq")  # which learn in more steps
# Of so few kinds of objects that eight samples hold most of their words.
KINDS = ["data.source.shapes=[circle,triangle,cross]", "data.source.colors=[red,green,blue,yellow]"]
OWN["masked_language_modeling"] = [*LONGER, *KINDS, "data.source.object_weights=[1,2,1]"]


def small(task: str, *more: str) -> list[str]:
    return command(task, "trainer.precision=32-true", *more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    """Trains a task once: the folder of the run."""
    made: dict[str, Path] = {}

    def run(task: str) -> Path:
        if task not in made:
            place = tmp_path_factory.mktemp(task)
            with redirect_stdout(io.StringIO()) as printed:
                assert main(small(task, "trainer.max_epochs=1", f"runs={place}")) == 0
            made[task] = only_run(place)
            (made[task] / "printed.txt").write_text(printed.getvalue(), encoding="utf-8")
        return made[task]

    return run


def check_the_verdict(printed: str, evaluation: Path) -> None:
    """Checks that an output ends with one verdict, and that the evaluation's files have the same sentence."""
    assert len(re.findall(r"^verdict ", printed, re.MULTILINE)) == 1
    sentence = re.sub(r"\s+", " ", printed.partition("\nverdict ")[2].partition("to try next:")[0]).strip()
    assert results(evaluation, "about")["verdict"] == sentence
    assert sentence[1:] in html.unescape((evaluation / "report.html").read_text(encoding="utf-8"))


@pytest.mark.sample(plain=1, slow=3)
@pytest.mark.parametrize("task", EACH)
def test_an_evaluation_gives_what_the_runs_own_test_gave(task, runs, tmp_path, capsys) -> None:
    own = runs(task) / "evaluation" / "test"
    check_the_verdict((runs(task) / "printed.txt").read_text(encoding="utf-8"), own)
    capsys.readouterr()
    assert vlm(["evaluate", "-c", best(runs(task)), "--out", str(tmp_path), *CPU]) == 0
    check_the_verdict(capsys.readouterr().out, tmp_path)
    for file in own.glob("*.json"):
        assert results(tmp_path, file.stem) == results(own, file.stem), file.name
    assert (tmp_path / "report.html").stat().st_size > 1000


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize("task", EACH)
def test_the_verdict_compares_the_same_samples_as_the_scores(task, runs) -> None:
    with ExitStack() as stack:
        _, module, _, scores = evaluate_checkpoint(best(runs(task)), [], stack, device="cpu")
        sentence = module.verdict().sentence
        found = {name.removeprefix("test/"): value for name, value in scores.items()}
        judged = next(name for name in module.verdict_metrics if name in found)
        controls = [control for control in CONTROLS if f"{judged}@{control}" in found]
        assert any(name in sentence for name in (judged.replace("_", " "), TITLES.get(judged, judged)))
        assert re.search(r", on [0-9]+ samples of test \([0-9,]+( tokens)? of train\), after [0-9]+ steps$", sentence)
        for control in controls:
            if control not in module.ablations and control != "chance":  # which is no system with outputs
                own, other, samples = module.scorers(judged, control)
                values = [float(scorer(np.ones((1, samples)))[0, 0]) for scorer in (own, other)]
                assert values == pytest.approx([found[judged], found[f"{judged}@{control}"]]), control
    assert controls, "the evaluation has no control"


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize("task", EACH)
def test_the_command_that_a_run_prints_works(task, runs, capsys, monkeypatch) -> None:
    monkeypatch.chdir(runs(task).parents[1])
    assert main([f"resume={runs(task)}"]) == 0
    checkpoint = best(runs(task))
    config = compose(small(task))
    data = build_data(config)
    data.restore(torch.load(checkpoint, weights_only=True)["vlm"])
    example = build_task(config, build_model(config, data.sizes)[0], data).example(data, runs(task))
    capsys.readouterr()
    program, *arguments = shlex.split(example)
    assert program == "vlm" and vlm([*arguments, "-c", checkpoint, *CPU]) == 0
    assert capsys.readouterr().out.strip()
    assert vlm(["info", "-c", checkpoint]) == 0
    assert f" {STORED.get(task, task_of(task))}\n" in capsys.readouterr().out


@pytest.mark.sample(slow=5)
@pytest.mark.parametrize("task", TASKS)
def test_data_that_are_drawn_have_no_fault(task, capsys) -> None:
    assert vlm(["check-data", *small(task)]) == 0
    assert "verdict     no problems found" in capsys.readouterr().out


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("task", EACH)
def test_eight_samples_are_learnt_by_heart(task, tmp_path) -> None:
    heart = ["debug=overfit", "trainer.max_epochs=150", "trainer.check_val_every_n_epoch=150", "model.size.dropout=0"]
    heart += ["optim.lr=5e-3", "callbacks.ema=null", *OWN.get(task_of(task), []), f"runs={tmp_path / 'runs'}"]
    heart += LONGER if task in RECURRENT else []
    assert main([*small(task), *heart]) == 0
    last = str(only_run(tmp_path / "runs") / "checkpoints" / "last.ckpt")
    assert vlm(["evaluate", "-c", last, "--split", "train", "--out", str(tmp_path / "out"), *CPU]) == 0
    assert results(tmp_path / "out")["train/loss"] < 0.2


@pytest.mark.sample(slow=18)
@pytest.mark.parametrize("task", [name for name in EACH if name != "word tagger"])  # it gets its bytes later
def test_every_parameter_gets_a_gradient(task, scramble) -> None:
    config = compose(small(task, "model.size.dropout=0"))
    check(config)
    data = build_data(config)
    data.prepare()
    model = scramble(build_model(config, data.sizes)[0])
    loss = build_task(config, model, data).loss(next(iter(data.train_dataloader())))
    sum(term.total for term in loss.values()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


# The models before the transformer: resumed, exported, changed by strangers, served.
earlier_models = pytest.mark.parametrize("name", MODELS)
SERVED = [name for name in MODELS if name not in ("bahdanau", "word tagger") and "recurrent" not in name]
CLASSES = (
    "WordEncoder",
    "RecurrentEncoder",
    "RecurrentDecoder",
    "BahdanauDecoder",
    "ShowAttendTellDecoder",
    "NeuralLanguageModel",
)


@pytest.mark.sample(slow=2)
@earlier_models
def test_a_resumed_run_ends_as_one_that_was_not_disturbed(name, runs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(5, signal.SIGTERM, patch)
        assert main(small(name, "trainer.max_epochs=1", f"runs={tmp_path}")) == 143
    assert main([f"resume={only_run(tmp_path)}"]) == 0
    last = [folder / "checkpoints" / "last.ckpt" for folder in (only_run(tmp_path), runs(name))]
    assert same_weights(*last)


@pytest.mark.sample(slow=2)
@earlier_models
def test_safetensors_give_the_same_and_no_class_of_hugging_face_does(name, runs, tmp_path, capsys):
    path, folder = best(runs(name)), str(tmp_path / "out")
    assert vlm(["export", folder, "-c", path, "--to", "safetensors"]) == 0
    one, other = (load_model(read(place)).state_dict() for place in (path, folder))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert vlm(["export", str(tmp_path / "theirs"), "-c", path, "--to", "huggingface"]) == 2
    assert "safetensors" in capsys.readouterr().err


@pytest.mark.sample(slow=2)
@earlier_models
def test_sizes_that_a_stranger_wrote_allocate_nothing(name, runs):
    loaded = read(best(runs(name)))

    def nodes(value):
        if isinstance(value, dict):
            yield from [value] if value.keys() == {"name", "args"} else []
            yield from (node for child in value.values() for node in nodes(child))

    found = [node["args"] for node in nodes(loaded["vlm"]["model"]) if node["name"] in CLASSES]
    places = [(args, key) for args in found for key, value in args.items() if type(value) is int]
    assert places
    for args, key in places:
        for size in (-1, 10**5, 10**12) if key != "max_len" else ():  # which is bounded as in all models
            value, args[key] = args[key], size
            with pytest.raises(UserError), convert_errors("x"):
                load_model(copy.deepcopy(loaded))
            args[key] = value


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("name", ["bahdanau", *SERVED])
def test_a_service_answers_as_python_does(name, runs):
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from services import CASES, body_of, client, predictor_of

    task, path = task_of(name), best(runs(name))
    answer = client(path).post("/predict", json=body_of(task))
    assert answer.status_code == 200, answer.text
    inputs, options = CASES[task]
    truth = predict_inputs(predictor_of(path), inputs, **options)
    several = [one if isinstance(one, list) else [one] for one in truth]
    answers = [one if isinstance(one, list) else [one] for one in answer.json()["results"]]
    assert [[text["text"] for text in one] for one in answers] == [[text.text for text in one] for one in several]


@pytest.mark.slow
def test_a_classifier_starts_from_contrastive_training(runs, tmp_path, capsys) -> None:
    run = runs("contrastive")
    start = [f"model.init_from={run}", "trainer.max_steps=2", "optim.lr=0.0", "callbacks.ema=null", "test=false"]
    capsys.readouterr()
    assert main(command("classification", *start, f"runs={tmp_path / 'class'}")) == 0
    assert "tensors loaded for model" in capsys.readouterr().out
    learned, taken = (
        torch.load(place / "checkpoints" / f"{name}.ckpt", weights_only=True)["state_dict"]
        for place, name in ((run, "best"), (only_run(tmp_path / "class"), "last"))
    )
    encoder = [name for name in taken if name.startswith("model.encoder.")]
    assert len(encoder) > 10 and all(torch.equal(taken[name], learned[name]) for name in encoder)
