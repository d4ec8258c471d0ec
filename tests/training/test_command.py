"""The command that a hint names is the one by which the process was started."""

import pytest

from vlm.training.command import train_command


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
