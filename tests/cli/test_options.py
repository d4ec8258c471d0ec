"""The command line is made without torch, so that a mistake is answered at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_checkpoints import FILES

from vlm.cli.main import COMMANDS, build_program, run
from vlm.errors import UserError
from vlm.inference.arguments import check_readable
from vlm.inference.tasks import TASKS, import_object

OF_TASKS = {f"{task} {command.name}": command for task, entry in TASKS.items() for command in entry.commands}
NAMES = sorted({command.name for command in OF_TASKS.values()} | {"predict", *COMMANDS})
CAPTIONER = str(FILES / "captioning.ckpt")


def long_flags(name: str) -> list[str]:
    """The options of a command that have a value, as they are typed; the program's own are left out."""
    parameters = build_program([name]).commands[name].params
    flags = [flag for one in parameters if not getattr(one, "is_flag", False) for flag in one.opts]
    return [flag for flag in flags if flag.startswith("--")]


@pytest.mark.slow
def test_no_heavy_library_is_imported_before_a_command_runs() -> None:
    program = (
        "import sys\nfrom vlm.cli.main import run\n"
        f"print([run([name, '--help']) for name in {NAMES!r}], file=sys.stderr)\n"
        "print({'torch', 'lightning', 'transformers', 'torchvision', 'gradio'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == f"{[0] * len(NAMES)}\nset()\n"
    assert done.stdout.count("Usage: ") == len(NAMES)


@pytest.mark.sample(plain=6, slow=6)
@pytest.mark.parametrize("name", NAMES)
def test_a_misspelt_option_is_answered_with_the_nearest_one(name: str, capsys) -> None:
    for flag in long_flags(name):
        assert run([name, f"{flag}q", "1"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: No such option '{flag}q'. ") and flag in said.removeprefix(f"{flag}q")
        assert said.endswith(f" (see vlm {name} --help)\n") and said.count("\n") == 1


@pytest.mark.parametrize("command", OF_TASKS.values(), ids=OF_TASKS)
def test_a_command_has_the_options_and_arguments_of_its_predictor(command) -> None:
    kind = import_object(command.predictor)
    assert kind.options is import_object(command.options) and kind.arguments is import_object(command.arguments)


@pytest.mark.sample(slow=6)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["caption", "a.png", "-c", "nope.ckpt", "--beam", "x"], "Invalid value for '--beam': "),
        (["caption", "a.png", "-c", "nope.ckpt", "--device", "gpu"], "--device: 'gpu' is unknown; choose auto, cpu, "),
        (
            ["chat", "-c", CAPTIONER, "--precision", "bf61"],
            "--precision: 'bf61' is unknown; choose auto, fp32, bf16 or",
        ),
        (["chat", "-c", "nope.ckpt"], "nope.ckpt: no such checkpoint"),
        (["predict", "x", "-c", "nope.ckpt", "--trust", "mine"], "nope.ckpt: no such checkpoint"),
        (
            ["evaluate", "-c", "nope.ckpt", "--split", "tset"],
            "--split: 'tset' is unknown; choose train, val or test; d",
        ),
        (["export", "out", "-c", "nope.ckpt", "--to", "onx"], "--to: 'onx' is unknown; choose huggingface, safetens"),
        (
            ["score", "a.json", "b.json", "--format", "jsn"],
            "--format: 'jsn' is unknown; choose text, json or csv; did ",
        ),
        (["bench", "optim.lrr=1"], "optim.lrr: unknown; did you mean lr?"),
        (["check-data", "optim.lrr=1"], "optim.lrr: unknown; did you mean lr?"),
        (["shard", "--out", "shards", "optim.lrr=1"], "optim.lrr: unknown; did you mean lr?"),
        (["bench", "--format", "jsn"], "--format: 'jsn' is unknown; choose text or json; did you mean json?"),
    ],
)
def test_a_wrong_value_is_answered_before_torch_is_imported(words: list[str], message: str, tmp_path: Path) -> None:
    program = f"import sys\nfrom vlm.cli.main import run\nprint(run({words!r}), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert (done.stdout, done.stderr[: len(message) + 7]) == ("2 False\n", f"error: {message}")


MISSING_FILES = [  # command line, exit status, missing files
    ("caption no.jpg", 1, ["no.jpg"]),
    ("caption no.jpg not.png", 1, ["no.jpg", "not.png"]),
    ("answer no.jpg --question what?", 1, ["no.jpg"]),
    ("classify no.jpg", 1, ["no.jpg"]),
    ("classify . --labels no.txt", 2, ["no.txt"]),
    ("embed no.jpg", 1, ["no.jpg"]),
    ("retrieve no.jpg --text a", 1, ["no.jpg"]),
    ("translate no.txt", 2, ["no.txt"]),
    ("translate --text a --image no.jpg", 1, ["no.jpg"]),
    ("chat here.jpg no.jpg", 1, ["no.jpg"]),
    ("evaluate --pairs no.csv", 2, ["no.csv"]),
]


@pytest.mark.slow
def test_missing_files_are_reported_before_the_checkpoint_is_read(tmp_path: Path) -> None:
    (tmp_path / "here.jpg").touch()
    (tmp_path / "model.ckpt").touch()  # reading it would be another error
    commands = [[*line.split(), "-c", "model.ckpt"] for line, _, _ in MISSING_FILES]
    program = "import sys\nfrom vlm.cli.main import run\n"
    program += f"print([run(words) for words in {commands}], 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = ["\n  ".join(f"{name}: No such file or directory" for name in names) for _, _, names in MISSING_FILES]
    assert done.stderr == "".join(f"error: {line}\n" for line in lines)
    assert done.stdout == f"{[status for _, status, _ in MISSING_FILES]} False\n"


def test_only_files_that_are_all_missing_stop_a_command(tmp_path: Path) -> None:
    here = tmp_path / "here.jpg"
    here.touch()
    for files in ([], [str(here), "no.jpg"], ["no.jpg", str(here)], ["*.jpg"], ["-"], [str(tmp_path)]):
        check_readable(files)
    here.chmod(0)
    if not os.access(here, os.R_OK):  # not as root
        with pytest.raises(UserError, match=r"here\.jpg: Permission denied"):
            check_readable([str(here)])
