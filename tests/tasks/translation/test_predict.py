"""`vlm translate` with its options, on a small model that was hardly trained."""

import io
import json

import pytest
from tiny_checkpoints import FILES

from vlm.cli.main import run

TEXTS = [
    "a small red circle",
    "there is a large blue cross left of a small red diamond",
    "you can see a large yellow circle",
    "",
    "the large green diamond is above the small green cross",
    "now I have drawn a small blue cross",
]
BEAM = ["--beam", "3", "--results", "2", "--length-penalty", "0.5"]


CHECKPOINT = str(FILES / "translation.ckpt")


@pytest.fixture
def translate(tmp_path):
    def translate(*arguments, form="jsonl"):
        path = tmp_path / "out"
        options = ["--precision", "fp32", "--device", "cpu", "--format", form, "--out", str(path)]
        assert run(["translate", *arguments, "-c", CHECKPOINT, *options]) == 0
        text = path.read_text()
        return [json.loads(line) for line in text.split("\n")[:-1]] if form == "jsonl" else text

    return translate


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], BEAM, ["--sample", "--results", "2", "--seed", "5"], ["--min-tokens", "5"]])
def test_translations_do_not_depend_on_the_batch(translate, file, options):
    """Texts of different lengths take the places of others, and what is padded is masked."""
    alone = translate(file, *options, "--batch-size", "1")
    assert [row["text"] for row in alone[:: len(alone) // len(TEXTS)]] == TEXTS
    for size in ("2", "32"):
        for row, other in zip(translate(file, *options, "--batch-size", size), alone, strict=True):
            assert (row["text"], row["translation"]) == (other["text"], other["translation"])
            assert row["logprob"] == pytest.approx(other["logprob"], abs=1e-4) and 0 < row["confidence"] <= 1
    assert len({row["translation"] for row in alone}) > 1


@pytest.mark.slow
def test_lines_of_stdin_or_of_files_one_translation_a_line(translate, file, tmp_path, monkeypatch):
    truth = [row["translation"] for row in translate(file)]
    assert translate(file, form="text") == "".join(f"{text}\n" for text in truth)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{text}\n" for text in TEXTS)))
    assert [row["translation"] for row in translate()] == truth
    assert translate(file, form="csv").splitlines()[0] == "text,translation,logprob,confidence"
    (tmp_path / "odd.txt").write_text("a\u2028small\u00a0red circle\n\na circle")  # only a line feed ends a line
    odd = [row["text"] for row in translate(str(tmp_path / "odd.txt"))]
    assert odd == ["a\u2028small\u00a0red circle", "", "a circle"]


def test_words_are_begun_with_and_required_and_the_tree_is_written(translate, tmp_path):
    assert translate("--text", TEXTS[0], "--prefix", "ein")[0]["translation"].startswith("ein")
    searched = ["--text", TEXTS[0], "--beam", "3", "--trace", str(tmp_path / "tree.json")]
    assert " Kreuz" in translate(*searched, "--require", "Kreuz")[0]["translation"]
    trees = json.loads((tmp_path / "tree.json").read_text())
    assert list(trees) == [TEXTS[0]] and trees[TEXTS[0]]["nodes"]


def test_a_text_that_is_cut_is_named(capsys):
    long = "a small red circle " * 40
    assert run(["translate", "--text", "a circle", "--text", long, "-c", CHECKPOINT, "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2
    assert printed.err.startswith("error: text 2: has more than the 38 tokens that the model reads")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["none.txt"], "none.txt: No such file or directory"),
        (["--text", "a", "--trace", "x"], "--trace"),
        (["--text", "a", "--results", "2"], "--results"),
        (["--text", "a\udcff"], "is not UTF-8"),
        (["empty.txt"], "empty.txt: is empty"),
        ([], "no input text"),  # on stdin
    ],
)
def test_wrong_use_is_named(arguments, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(["translate", *arguments, "-c", CHECKPOINT]) == 2
    assert named in capsys.readouterr().err
