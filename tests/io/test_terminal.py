"""Lines are folded where a reader would break them, and on a terminal alone; a shell reads back what was meant."""

import io
import shlex
import shutil
import subprocess

import pytest

from vlm.io.terminal import PIPE_WIDTH, columns, fold, line_width, shell_line, train_command
from vlm.training.run.train import format_summary

SCORES = "step 24: " + "  ".join(f"metric{n} 0.{n:04}" for n in range(30))
SAMPLE = "  'A man in a shirt .'" + " " * 40 + "reference: 'Two children in swimsuits stand talking in a lake .'"
CAUSE = "  - images that do not belong to their captions: see some of them with vlm check-data --out DIR, or --beam 4"
NAMED = "pace        1.2 s a step: about 6 s an epoch of 5 steps, 2 min to the end, without validation, as it is now"


@pytest.fixture(params=[40, 60, 80, 86, 120])
def width(request, monkeypatch) -> int:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


@pytest.mark.parametrize("line", [SCORES, SAMPLE, CAUSE, NAMED])
def test_a_line_that_is_too_long_is_folded_between_words(line: str, width: int) -> None:
    rows = fold(line).split("\n")
    assert max(map(len, rows)) < width and " ".join(rows).split() == line.split()
    assert len(rows) == 1 or len(line) >= width
    assert all(row.startswith("    ") for row in rows[1:])


def test_a_score_stays_with_its_name_and_an_option_with_its_value(width: int) -> None:
    assert all(f"metric{n} 0.{n:04}" in fold(SCORES) for n in range(30))
    assert "--out DIR" in fold(CAUSE) and "--beam 4" in fold(CAUSE)


def test_columns_part_first(width: int) -> None:
    apart = fold(SAMPLE).split("\n")[0] == "  'A man in a shirt .'"
    assert apart == (width < 90)  # in 120 columns both fit side by side


@pytest.mark.parametrize("line", [NAMED, "  classes   " + ", ".join(["yellow circle"] * 12)])
def test_the_text_of_a_named_line_keeps_its_column(line: str, width: int) -> None:
    first, *rows = fold(line).split("\n")
    assert first.startswith(line[:20]) and all(row.startswith(" " * 12) and row[12] != " " for row in rows)


CHINESE = (
    "  = '"
    + "一个男人骑着一匹白马走过田野，两只狗跟在后面。" * 3
    + "'   reference: '"
    + "两个孩子在湖里游泳。" * 4
    + "'"
)
THAI = "  '" + "ผู้ชายคนหนึ่งขี่ม้าขาว" * 10 + "'"


@pytest.mark.parametrize("line", [CHINESE, THAI])
def test_text_without_spaces_is_folded_inside_its_column(line: str, width: int) -> None:
    """A Chinese character takes two columns; no row begins with a punctuation mark or with a vowel sign of Thai."""
    rows = fold(line).split("\n")
    assert len(rows) > 1 and max(map(columns, rows)) < width
    assert "".join(row.strip() for row in rows).replace(" ", "") == line.replace(" ", "")
    assert all(
        row.startswith("    ") and row.strip()[0] not in "，。\u0e31\u0e34\u0e35\u0e48\u0e49" for row in rows[1:]
    )
    assert max(map(columns, rows)) > 0.7 * width  # rows are filled


def test_columns_of_wide_and_combining_characters() -> None:
    assert [columns(text) for text in ("abc", "狗。", "e\u0301", "ผู้")] == [3, 4, 1, 1]


def test_a_path_is_not_broken(width: int) -> None:
    path = "/data/" + "folder/" * 20 + "photo.jpg"
    assert path in fold(f"report      {path}").split("\n")[-1]


def test_a_file_gets_whole_lines() -> None:
    assert fold(SCORES) == SCORES and fold(CHINESE) == CHINESE
    assert line_width(io.StringIO()) is None


def test_sentences_for_a_pipe_have_80_columns_and_commands_stay_whole() -> None:
    command = "(vlm train model=pretrained model.path=FOLDER)"
    line = f"            to try next: {'more data; ' * 4}fine-tune it on data of this kind {command}"
    rows = fold(line, pipe_width=PIPE_WIDTH).split("\n")
    assert len(rows) > 1 and max(map(len, rows)) <= 80 and " ".join(rows).split() == line.split()
    assert any(command in row for row in rows) and fold(line) == line


# Commands to copy

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
