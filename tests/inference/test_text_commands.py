"""The commands that read texts on faulty ones: each is named, and the others are done."""

import io
import json
import sys
from types import SimpleNamespace

import forks
import pytest
from tiny_checkpoints import COMMANDS, FILES, IMAGES, STORY

from vlm.cli import main
from vlm.inference.arguments import read_texts
from vlm.io.files import read_arguments
from vlm.tasks.masked_language_modeling.predict import GapFiller
from vlm.tasks.tagging import predict as tagging


@pytest.fixture
def vlm(capsys):
    """Runs a command with a tiny checkpoint; returns its status, the lines that it prints, and those on stderr."""

    def run(task, *words):
        command = [*words, "-c", str(FILES / f"{task}.ckpt"), "--device", "cpu", "--precision", "fp32"]
        status = main.run(command)
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err.splitlines()

    return run


@pytest.fixture
def story(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text(STORY)


def test_a_text_without_a_gap_is_named_and_the_others_are_filled_in(vlm):
    status, out, err = vlm("masked_language_modeling", "fill", "a [MASK] circle", "a red circle", "[MASK] " * 400)
    assert status == 1 and len(out) == 1 and out[0].startswith("a [MASK] circle\t")
    assert err[0].startswith("error: a red circle: has no [MASK]; put it")
    assert err[1].startswith(f"error: {('[MASK] ' * 400)[:50]} ...: has ") and len(err) == 2


def test_texts_of_which_none_has_a_gap_are_wrong_usage(vlm):
    line = f"error: {('a red circle' * 99)[:50]} ...: has no [MASK]; put it in place of each word to fill in"
    assert vlm("masked_language_modeling", "fill", "a red circle" * 99) == (2, [], [line])


def test_several_words_of_a_gap_stand_behind_a_tab(vlm):
    status, (line,), _ = vlm("masked_language_modeling", "fill", "a [MASK] circle", "--top", "2")
    text, filled, words = line.split("\t")
    assert status == 0 and text == "a [MASK] circle" and filled.endswith("circle") and len(words.split()) == 4


def test_of_tokens_that_differ_in_a_space_the_likelier_is_kept():
    names = {1: " red", 2: "blue", 3: "red"}
    filler = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids: names[ids[0]]))
    words = GapFiller._words(filler, [0.6, 0.3, 0.1], [1, 2, 3])
    assert list(words.items()) == [("red", 0.6), ("blue", 0.3)]


def test_a_line_that_is_no_pair_is_named_and_the_others_are_classified(vlm, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"a red dot\ta dot\n{'x' * 100}\nx y\tx\n"))
    status, out, err = vlm("text_classification", "classify", "--format", "jsonl")
    assert status == 1 and [json.loads(line)["text"] for line in out] == ["a red dot", "x y"]
    assert err == [
        f"error: {'x' * 50} ...: this model reads pairs of texts; give TEXT<TAB>TEXT, or a --pair to each --text"
    ]


@pytest.mark.parametrize("count", [59, 60])
def test_a_pair_that_is_not_read_whole_is_noted(count, vlm):
    """Of bytes, 120 places hold the begin, two ends and 117 of the texts."""
    status, out, err = vlm("text_classification", "classify", "--text", "a" * count, "--pair", "b" * 58)
    assert status == 0 and len(out) == 1
    assert err == [] if count == 59 else err[0].startswith("note: 1 of 1 texts: more than the 117 tokens")


@pytest.mark.parametrize(
    ("task", "source", "part"), [("span_answering", "story.txt", "end"), ("image_questions", IMAGES[0], "beginning")]
)
def test_a_question_that_is_not_read_whole_is_noted(task, source, part, vlm, story):
    question = "is there a red circle? " * 99
    status, out, err = vlm(task, "answer", source, "--question", question, "--question", "is it red?")
    assert status == 0 and len(out) == 2
    assert err[-1].startswith("note: 1 of 2 questions: more than the ") and f"the {part} of each was left" in err[-1]


@pytest.mark.parametrize(
    "fault",
    [
        *(MemoryError(), OSError(12, "Cannot allocate memory")),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried ..."),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate 9.00 GiB"),
    ],
)
def test_a_want_of_memory_is_a_line_and_status_1(fault, monkeypatch, capsys):
    def raise_fault(checkpoint):
        raise fault

    monkeypatch.setattr("vlm.inference.info.describe", raise_fault)
    assert main.run(["info", "-c", str(FILES / "captioning.ckpt")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: out of memory; lower --batch-size")


def test_other_faults_keep_their_traceback(monkeypatch):
    monkeypatch.setattr("vlm.inference.info.describe", lambda checkpoint: (_ for _ in ()).throw(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main.run(["info", "-c", str(FILES / "captioning.ckpt")])


def test_a_trace_does_not_take_the_place_of_the_results(vlm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--beam", "2", "--trace", "./results.txt", "--out", "results.txt"]
    status, _, (line,) = vlm("translation", "translate", "--text", "a red circle", *options)
    assert status == 2 and line == "error: --trace ./results.txt: is the same file as --out; choose another"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("task", [task for task in COMMANDS if task != "text_to_image"])  # its --out is a folder
def test_a_full_disk_under_out_is_a_line_and_status_1(task, vlm, story):
    status, _, err = vlm(task, *COMMANDS[task], "--out", "/dev/full")
    assert status == 1 and len(err) == 1
    assert err[0].startswith("error: --out /dev/full: cannot be written (No space left on device)")


@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.nightly)])  # every third command, or all
@pytest.mark.slow
def test_a_full_stdout_is_a_line_and_status_1(story, share):
    words = [("captioning", ["info"]), *COMMANDS.items()][::share]
    commands = [["-m", "vlm", *some, "-c", str(FILES / f"{task}.ckpt")] for task, some in words]
    with open("/dev/full", "w") as full:
        found = forks.run(commands, stdout=full)
    assert len(found) == len(commands)
    for status, said in found:
        assert status == 1 and said.startswith("error: stdout: cannot be written (No space left on device)"), said
        assert len(said.splitlines()) == 1


def test_a_text_of_any_length_is_tagged_some_rows_at_a_time(vlm, monkeypatch):
    """All rows of a text at once took memory as its length, and time as its square."""
    sizes, own = [], tagging.tag_probabilities

    def note_size(model, rows):
        sizes.append(len(rows.tokens))
        return own(model, rows)

    monkeypatch.setattr(tagging, "tag_probabilities", note_size)
    status, (line,), _ = vlm("tagging", "tag", "--text", "a small red circle " * 2000)
    assert status == 0 and max(sizes) <= tagging.ROWS
    assert [word.split("/")[0] for word in line.split()] == ["a", "small", "red", "circle"] * 2000


def test_given_words_are_split_only_at_spaces(vlm):
    """A word of a treebank may have a no-break space inside, as French numbers do."""
    status, (line,), _ = vlm("tagging", "tag", "--words", "--text", "  25\u00a0000 red  circles. ")
    assert status == 0 and [word.rpartition("/")[0] for word in line.split(" ")] == ["25\\xa0000", "red", "circles."]


def test_a_byte_order_mark_on_stdin_is_no_part_of_the_text(vlm, monkeypatch):
    marked = io.TextIOWrapper(io.BytesIO("\ufeffa\n\ufeffb\n".encode()), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", marked)
    main.accept_any_file_name()
    assert [line.split("/")[0] for line in vlm("tagging", "tag")[1]] == ["a", "\\ufeff"]  # within a text it is one


def test_only_a_line_feed_ends_a_line_of_stdin_or_of_a_file(vlm, monkeypatch, tmp_path):
    content = "a\rred\u2028dot\r\nb\n".encode()  # in text mode Python would end a line at the lone carriage return
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    main.accept_any_file_name()
    assert read_texts([], []) == ["a\rred\u2028dot", "b"]
    (tmp_path / "texts.txt").write_bytes(content)
    assert read_texts([str(tmp_path / "texts.txt")], []) == ["a\rred\u2028dot", "b"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\rb.png\r\nc.png\n"), encoding="utf-8"))
    main.accept_any_file_name()
    assert read_arguments(["-"]) == ["a\rb.png", "c.png"]


@pytest.mark.parametrize(
    ("task", "words", "line"),
    [
        ("image_questions", ["answer", "story.txt"], "--question: missing; a model for image_questions needs it"),
        ("classification", ["classify", "--text", "a"], "IMAGES: missing; a model for classification needs it"),
        ("text_classification", ["classify", "story.txt"], "IMAGES: not supported by a model for text_classification;"),
    ],
)
@pytest.mark.usefixtures("story")
def test_what_is_missing_or_too_much_is_named_as_it_is_typed(task, words, line, vlm):
    (said,) = vlm(task, *words)[2]
    assert said.startswith(f"error: {line}")


@pytest.mark.parametrize("task", ["image_questions", "span_answering"])
@pytest.mark.usefixtures("story")
def test_an_empty_question_is_refused(task, vlm):
    expected = (2, [], ["error: --question: is empty; give a question, or several"])
    assert vlm(task, "answer", "story.txt", "--question", "where?", "--question", "") == expected


def test_info_shows_sizes_and_no_other_arguments(capsys) -> None:
    assert main.run(["info", "-c", str(FILES / "captioning.ckpt")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "task        captioning",
        "model       VisionLanguageModel, 13,632 parameters",
        "  encoder: ViT (image_size=32 patch_size=8 dim=16 depth=1 num_heads=2)",
        "  decoder: Decoder (vocab_size=259 max_len=32 dim=16 depth=1 num_heads=2)",
        "    positions: LearnedPositions (max_len=32 dim=16)",
    ]
    assert "None" not in "".join(lines) and lines[-3] == "data        Shapes" and lines[-1].startswith("scores ")
