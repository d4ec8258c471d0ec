"""The ten mistakes that are timed get the messages that the benchmark expects."""

import pytest
from scripts import load


@pytest.mark.slow
def test_every_mistake_is_answered(monkeypatch, capsys):
    module = load("first_mistakes", monkeypatch)
    module.main(1)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| `vlm ")]
    assert len(rows) == len(module.MISTAKES) == 10


def test_a_command_without_its_message_ends_the_benchmark(monkeypatch, tmp_path):
    module = load("first_mistakes", monkeypatch)
    with pytest.raises(SystemExit, match=r"expected a message with 'nothing', got status 2"):
        module.time_command("--nosuch", "nothing", str(tmp_path))
