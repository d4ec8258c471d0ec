"""Lines that a user copies: a shell reads back what was meant."""

import shlex
import shutil
import subprocess

import pytest

from vlm.io.terminal import shell_line
from vlm.training.run.train import format_summary

TEXTS = ["plain", "two words", 'it\'s "so" `here` $HOME \\n !!', "", "a\nb\ttab\r", "\U0001f468\u200d\U0001f469 'x' \\"]
TEXTS += ["ελληνικά 狗 #=*?", "\u200d1f", "\x1b[31m"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_a_shell_reads_back_every_argument(shell, locale):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    line = shell_line(TEXTS)
    assert line.isprintable()
    program = [shell, "-c", f"printf '%s\\0' {line}"]
    done = subprocess.run(program, capture_output=True, check=True, env={"LC_ALL": locale})
    assert done.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1] == TEXTS


def test_the_command_to_try_gives_back_its_text(tmp_path):
    text = '\U0001f468\u200d\U0001f469 it\'s\na "dog"'
    checkpoint = tmp_path / "my run" / "checkpoints" / "best.ckpt"
    said = format_summary(checkpoint, {}, f"vlm tag --text {shlex.quote(text)}", [])
    (line,) = (line.removeprefix("try") for line in said.splitlines() if line.startswith("try"))
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    *start, given, _, checkpoint, _ = done.stdout.decode().split("\0")
    assert start == ["vlm", "tag", "--text"] and given == text and checkpoint.endswith("my run/checkpoints/best.ckpt")
