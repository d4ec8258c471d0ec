"""The command that a hint names is the one by which the process was started."""

import pytest

from vlm.io.terminal import train_command


@pytest.mark.parametrize(
    ("started", "command"),
    [
        ("/usr/bin/vlm", "vlm train"),
        ("vlm.exe", "vlm train"),
        ("train.py", "python train.py"),
        ("/opt/pytest", "python train.py"),
    ],
)
def test_hints_name_the_command_of_this_process(started, command, monkeypatch):
    monkeypatch.setattr("sys.argv", [started])
    assert train_command("resume=runs/a b") == f"{command} 'resume=runs/a b'"


def test_hints_name_a_script_only_where_it_is(monkeypatch, tmp_path):
    """Who has the installed package alone, and trains from Python, has no train.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["notebook"])
    assert train_command("resume=last") == "vlm train resume=last"
    (tmp_path / "train.py").touch()
    assert train_command("resume=last") == "python train.py resume=last"
    monkeypatch.setattr("sys.argv", [str(tmp_path / "train.py")])  # the one that was called
    assert train_command("resume=last") == f"python {tmp_path}/train.py resume=last"
