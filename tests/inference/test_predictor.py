"""Predictors and commands: read without torch, found by a task's name, or in a user's own package that is trusted."""

import subprocess
import sys
from pathlib import Path

import hostile_files
import pytest
import torch
from tiny_checkpoints import FILES

from vlm.cli.main import run
from vlm.errors import UserError
from vlm.inference.predictor import Predictor
from vlm.inference.tasks import TASKS, import_object
from vlm.nn.device import choose_device

COMMANDS = sorted({command.name for task in TASKS.values() for command in task.commands})
ROOT = Path(__file__).parents[2]
PACKAGE = """
from dataclasses import dataclass
from typing import Annotated

from vlm.inference.options import Option, Options
from vlm.inference.predictor import BatchPredictor

@dataclass(kw_only=True)
class CountingOptions(Options):
    times: Annotated[int, Option("What the count is multiplied by.", least=1)] = 1

class Counter(BatchPredictor):
    task = "outside.Counting"
    fields = ("text", "count")
    options = CountingOptions

    def restore(self, about):
        self.unit = about["unit"]

    def predict(self, batch, options):
        return [len(text) * options.times for text in batch]

    def record(self, source, result, options, *, form="jsonl"):
        return [{"text": source, "count": result, "unit": self.unit}]

class Counting:
    predictor = Counter
"""


def test_each_task_has_a_folder_a_command_and_a_predictor():
    assert {*TASKS} == {path.parent.name for path in (ROOT / "vlm" / "tasks").glob("*/predict.py")}
    for name, task in TASKS.items():
        for command in task.commands:
            predictor = import_object(command.predictor)
            assert issubclass(predictor, Predictor) and (predictor.task == name or command.name in ("embed", "chat"))
            assert command.function is None or callable(import_object(command.function))


def test_help_names_all_commands_without_torch():
    program = "import sys; from vlm.cli.main import run; run(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "click" in loaded and not loaded & {"torch", "lightning", "hydra", "torchvision", "timm", "numpy", "regex"}
    assert all(f" {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_its_groups(command, capsys):
    assert run([command, "--help"]) == 0
    said = capsys.readouterr().out
    for option in ("--checkpoint", "--trust"):
        assert option in said
    assert ("--batch-size" in said) == (command != "chat")  # which answers one message at a time
    writes = command in ("answer", "caption", "generate", "translate")
    assert ("--format" in said) == (command != "chat")  # which writes no records
    assert ("--no-repeat-ngram" in said) == writes
    assert ("--greedy" in said) == (writes or command == "chat")


@pytest.fixture
def counting(tmp_path, monkeypatch):
    (tmp_path / "outside.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "counting.ckpt"
    hostile_files.about(task="outside.Counting", unit="letters")(path)
    yield str(path)
    sys.modules.pop("outside", None)


@pytest.mark.slow
def test_predict_uses_a_task_of_ones_own_package(counting, capsys):
    assert run(["predict", "one", "three", "-c", counting, "--trust", "outside"]) == 0
    assert capsys.readouterr().out == "one\t3\nthree\t5\n"
    assert run(["predict", "a,b", "-c", counting, "--trust", "outside", "--format", "csv"]) == 0
    assert capsys.readouterr().out == 'text,count,unit\n"a,b",3,letters\n'


def test_predict_offers_the_options_of_a_task_of_ones_own(counting, capsys):
    own = ["-c", counting, "--trust", "outside"]
    assert run(["predict", "one", "--times", "3", *own]) == 0
    assert capsys.readouterr().out == "one\t9\n"
    assert run(["predict", "--help", *own]) == 0 and "--times" in capsys.readouterr().out
    unknown = "--top: not supported by a model for outside.Counting"
    for wrong, said in ((["--times", "0"], "--times"), (["--top", "2"], unknown)):
        assert run(["predict", "one", *wrong, *own]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--trust", "other"], ["--trust", "out"]])
def test_a_package_that_is_not_trusted_is_not_imported(counting, options, capsys):
    assert run(["predict", "one", "-c", counting, *options]) == 2
    assert (
        "add --trust outside (to vlm train: trust=outside)" in capsys.readouterr().err and "outside" not in sys.modules
    )


@pytest.mark.parametrize(
    ("task", "said"), [("outside.PACKAGE", "is not a Predictor"), ("outside.gone.Task", "outside.gone")]
)
def test_a_task_without_a_predictor_is_a_line(counting, task, said, capsys):
    hostile_files.about(task=task)(Path(counting))
    assert run(["predict", "one", "-c", counting, "--trust", "outside"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and len(captured.err.splitlines()) == 1


def test_info_of_a_task_of_ones_own(counting, capsys):
    assert run(["info", "-c", counting]) == 0
    assert "task        outside.Counting" in capsys.readouterr().out


def test_a_prompt_that_is_no_utf8_is_refused(capsys):
    assert run(["generate", "--prompt", "caf\udce9", "-c", str(FILES / "language_modeling.ckpt")]) == 2
    assert capsys.readouterr().err == r"error: text caf\udce9: is not UTF-8; give text in UTF-8" + "\n"


def test_auto_takes_a_gpu_then_apples_device_then_the_cpu(monkeypatch):
    there = {"cuda": True, "mps": True}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there["cuda"])
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: there["mps"])
    chosen = [choose_device("auto")]
    for device in there:
        there[device] = False
        chosen.append(choose_device("auto"))
        with pytest.raises(UserError, match=f"--device {device}: this machine has no"):
            choose_device(device)
    assert chosen == ["cuda", "mps", "cpu"]
