"""Checkpoints of every task that were changed by a stranger are refused in a line by the task's own command."""

from pathlib import Path

import pytest
import tiny_checkpoints as tiny

from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run as vlm

EACH = [task if task == "tagging" else pytest.param(task, marks=pytest.mark.slow) for task in tiny.TASKS]


def giant(about):
    """Every size of the model a million times what it was."""
    pending = [about["model"]["args"]]
    while pending:
        args = pending.pop()
        for name, value in args.items():
            if isinstance(value, dict):
                pending.append(value["args"])
            elif type(value) is int and name in ("dim", "depth", "vocab_size", "max_len"):
                args[name] = value * 10**6


def mistyped(about):
    for name in about.keys() & {"tokenizer", "preprocess", "classes", "max_len"}:
        about[name] = 7 if isinstance(about[name], dict | list) else {"x": []}


def shorter(about):
    """A tokenizer, or classes, of another size than the model's."""
    if "classes" in about:
        about["classes"] = about["classes"][:1]
    else:
        about["tokenizer"] |= {"learned": "abc" if about["tokenizer"]["learned"] else "x"}


CHANGES = {
    "named": lambda about: about["model"].update(name="os.system"),
    "foreign": lambda about: about["model"].update(name="SentencePieceTokenizer"),
    "giant": giant,
    "wordless": lambda about: about.update(task=["captioning"]),
    "bare": lambda about: [about.pop(name, None) for name in ("tokenizer", "preprocess", "classes")],
    "mistyped": mistyped,
    "shorter": shorter,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("task", EACH)
def test_a_changed_checkpoint_is_refused_in_a_line(task, change, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("story.txt").write_text(tiny.STORY)  # the text of a command; files are checked before the checkpoint
    loaded, path = read(tiny.FILES / f"{task}.ckpt"), tmp_path / "stranger.ckpt"
    CHANGES[change](loaded["vlm"])
    write(path, loaded)
    assert vlm([*tiny.COMMANDS[task], "-c", str(path), *tiny.EXACT]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and "Traceback" not in said.err and len(said.err.splitlines()) <= 2
    assert said.out == ""
