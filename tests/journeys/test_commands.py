"""The commands beside one another: `vlm predict` for any task, and each on a model that is for another."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vlm import __version__
from vlm.checkpoint import load as ckpt
from vlm.cli.main import run as vlm

RUNS = {"caption": "trained", "classify": "trained_classifier", "generate": "trained_text"}


@pytest.fixture
def checkpoints(request: pytest.FixtureRequest) -> dict[str, str]:
    """The checkpoint that each command is for."""
    runs = {command: request.getfixturevalue(name) for command, name in RUNS.items()}
    return {command: str(run / "checkpoints" / "best.ckpt") for command, run in runs.items()}


FORMS = ["text", "jsonl", "csv"]
FIRST = list(zip(RUNS, FORMS, strict=True))  # each command once, and each form
PAIRS = [(command, form) for command in RUNS for form in FORMS]
OTHERS = [pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in FIRST]


@pytest.mark.parametrize(("command", "form"), [*FIRST, *OTHERS])
def test_predict_is_the_command_of_its_task(command, form, checkpoints, photos: Path, capsys) -> None:
    images = [str(path) for path in sorted(photos.glob("*.png"))[:3]]
    inputs = ["A red", "A large blue c"] if command == "generate" else images
    options = ["-c", checkpoints[command], "--device", "cpu", "--format", form]
    given = [part for prompt in inputs for part in ("--prompt", prompt)] if command == "generate" else inputs
    assert vlm([command, *given, *options]) == 0
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) >= 2
    assert vlm(["predict", *inputs, *options]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(("command", "right"), [(one, other) for one in RUNS for other in RUNS if one != other])
def test_a_model_for_another_task_is_status_2_and_names_its_command(
    command, right, checkpoints, photos: Path, capsys
) -> None:
    given = ["--prompt", "A"] if command == "generate" else [str(photos)]
    assert vlm([command, *given, "-c", checkpoints[right]]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert captured.err.startswith(f"error: {checkpoints[right]}: holds a model for ")
    assert f"`vlm {right}`" in captured.err


def test_the_bare_command_shows_its_help_and_no_fault(capsys) -> None:
    assert vlm([]) == 2
    shown = capsys.readouterr()
    assert "check-data" in shown.out + shown.err and "error" not in shown.err


@pytest.mark.parametrize("program", [["-m", "vlm"], ["-c", "from vlm.cli.main import main; main()"]])
def test_the_version_is_said(program) -> None:
    done = subprocess.run([sys.executable, *program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"vlm {__version__}\n"


@pytest.mark.parametrize(("line", "expected"), [("vlm cap", "caption"), ("vlm score --fo", "--format")])
def test_a_shell_completes_commands_and_options(line: str, expected: str) -> None:
    asked = {"_VLM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    program = "import sys; sys.argv = ['vlm']; from vlm.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **asked})
    assert done.stdout.split() == [expected]


@pytest.mark.parametrize(
    ("command", "holds", "lacks"),
    [
        ("caption", "captioning|VisionLanguageModel|ViT|SentencePieceTokenizer|Shapes|val/exact_match", "classes"),
        ("classify", "classification|Classifier|ShapeClasses|red circle, red cross, |val/accuracy", "tokenizer"),
        ("generate", "language_modeling|Decoder|SceneText|CharTokenizer|val/bits_per_byte", "preprocess"),
    ],
)
def test_info_says_what_the_file_holds(command, holds, lacks, checkpoints, capsys) -> None:
    assert vlm(["info", "-c", checkpoints[command]]) == 0
    said = capsys.readouterr().out
    first = {line.split()[0]: line for line in said.splitlines() if not line.startswith(" ")}
    task, *parts = holds.split("|")
    assert all(part in said for part in parts) and lacks not in first and first["task"].endswith(f" {task}")
    count = sum(tensor.numel() for tensor in ckpt.weights(ckpt.read(checkpoints[command])).values())
    assert f"{count:,} parameters" in first["model"]
