"""The models before the transformer, used as any other: resumed, exported, changed by strangers, served."""

import copy
import signal

import pytest
import torch
from journey import best, interrupt_at, only_run, same_weights
from small import MODELS, command, task_of
from used import used

from vlm.checkpoint.load import load_model, read
from vlm.checkpoint.rebuild import convert_errors
from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.training.run.fit import main

EXACT = ["trainer.precision=32-true", "trainer.max_epochs=2"]
EACH = [name if name == "bahdanau" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
OURS = ("RecurrentEncoder", "RecurrentDecoder", "BahdanauDecoder", "ShowAttendTellDecoder", "NeuralLanguageModel")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Trains a model once, without being disturbed: the folder of the run."""
    made = {}

    def run(name):
        if name not in made:
            place = tmp_path_factory.mktemp("whole")
            assert main(command(name, *EXACT, f"runs={place}")) == 0
            made[name] = only_run(place)
        return made[name]

    return run


@pytest.mark.parametrize("name", EACH)
def test_a_resumed_run_ends_as_one_that_was_not_disturbed(name, runs, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(5, signal.SIGTERM, patch)
        assert main(command(name, *EXACT, f"runs={tmp_path}")) == 143
    assert main([f"resume={only_run(tmp_path)}"]) == 0
    last = [folder / "checkpoints" / "last.ckpt" for folder in (only_run(tmp_path), runs(name))]
    assert same_weights(*last)


@pytest.mark.parametrize("name", EACH)
def test_safetensors_give_the_same_and_no_class_of_hugging_face_does(name, runs, tmp_path, capsys):
    path, folder = best(runs(name)), str(tmp_path / "out")
    assert vlm(["export", folder, "-c", path, "--to", "safetensors"]) == 0
    one, other = (load_model(read(place)).state_dict() for place in (path, folder))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert vlm(["export", str(tmp_path / "theirs"), "-c", path, "--to", "huggingface"]) == 2
    assert "safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("name", EACH)
def test_sizes_that_a_stranger_wrote_allocate_nothing(name, runs):
    loaded = read(best(runs(name)))

    def nodes(value):
        if isinstance(value, dict):
            yield from [value] if value.keys() == {"name", "args"} else []
            yield from (node for child in value.values() for node in nodes(child))

    found = [node["args"] for node in nodes(loaded["vlm"]["model"]) if node["name"] in OURS]
    places = [(args, key) for args in found for key, value in args.items() if type(value) is int]
    assert places
    for args, key in places:
        for size in (-1, 10**5, 10**12) if key != "max_len" else ():  # which is bounded as in all models
            value, args[key] = args[key], size
            with pytest.raises(UserError), convert_errors("x"):
                load_model(copy.deepcopy(loaded))
            args[key] = value


@pytest.mark.parametrize("name", [one for one in EACH if "recurrent" not in str(one)])
def test_a_service_answers_as_python_does(name, runs):
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx")
    from services import CASES, body_of, client, predictor_of

    task, path = task_of(name), best(runs(name))
    answer = client(path).post("/predict", json=body_of(task))
    assert answer.status_code == 200, answer.text
    inputs, options = CASES[task]
    truth = used(predictor_of(path), inputs, **options)
    several = [one if isinstance(one, list) else [one] for one in truth]
    answers = [one if isinstance(one, list) else [one] for one in answer.json()["results"]]
    assert [[text["text"] for text in one] for one in answers] == [[text.text for text in one] for one in several]
