"""What a finished run says."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlm.cli.main import run as vlm
from vlm.training.callbacks.signals import RunInterrupted
from vlm.training.run.faults import describe_last_save
from vlm.training.run.fit import main
from vlm.training.run.train import column_note, format_summary, report_interruption, split_note
from vlm.training.step.losses import NotFiniteError


@pytest.mark.parametrize(
    ("chosen", "split", "marked"),
    [
        ({"monitor": "val/loss"}, "val", True),
        ({"monitor": "val/loss"}, "test", False),
        ({"monitor": None}, "val", False),
    ],
)
def test_scores_on_the_split_that_chose_the_checkpoint_are_marked(chosen, split, marked):
    said = split_note({"callbacks": {"checkpoints": chosen}}, {f"{split}/loss": 1.0})
    assert ("slightly optimistic" in said) == marked
    assert split_note({"callbacks": {"checkpoints": None}}, {f"{split}/loss": 1.0}) == ""


def test_a_run_may_be_stopped_before_its_callbacks_are_set_up(tmp_path, capsys):
    run = SimpleNamespace(folder=tmp_path, trainer=SimpleNamespace(strategy=SimpleNamespace(launcher=None)))
    assert report_interruption(run, RunInterrupted(signal.SIGINT, saved=False)) == 130
    assert "resume" not in capsys.readouterr().out


def test_a_run_without_checkpoints_is_refused_before_anything_is_made(tmp_path, capsys):
    assert main(["callbacks.checkpoints=null", f"runs={tmp_path / 'runs'}"]) == 2
    assert "callbacks.checkpoints: is required" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


SMALL = [f"data.source.{split}_scenes=8" for split in ("train", "val", "test")] + ["callbacks.progress=null"]
SMALL += ["trainer=cpu", "data.num_workers=0", "data.batch_size=4", "tokenizer=char"]


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_limit_that_leaves_no_batch_ends_in_a_line(split, tmp_path, capsys):
    assert main([*SMALL, f"trainer.limit_{split}_batches=1e-9", f"runs={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: trainer: ") and f"limit_{split}_batches" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_test_without_batches_has_no_scores(tmp_path, capsys):
    assert main([*SMALL, "trainer.max_steps=1", "trainer.limit_test_batches=0", f"runs={tmp_path}"]) == 0
    assert "the best checkpoint" not in capsys.readouterr().out
    (checkpoint,) = tmp_path.glob("*/*/checkpoints/best.ckpt")
    assert not list(tmp_path.glob("*/*/evaluation"))
    assert vlm(["evaluate", "-c", str(checkpoint)]) == 2
    assert "trainer.limit_test_batches: no batch remains" in capsys.readouterr().err
    for split, seen in (("train", True), ("val", False)):
        assert vlm(["evaluate", "-c", str(checkpoint), "--split", split, "trainer.limit_test_batches=1.0"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("(the model was trained on these samples: its scores on new ones are lower)" in said) == seen
        assert ("which the model was trained on" in said) == seen


@pytest.mark.parametrize(("precision", "advised"), [("bf16-mixed", True), ("32-true", False), ("64-true", False)])
def test_more_bits_are_advised_to_whom_they_may_help(precision, advised, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    said = describe_last_save(tmp_path, NotFiniteError("the loss is not finite", 1), precision=precision)
    assert ("trainer.precision=32-true" in said) == advised and "lower optim.lr" in said


def test_the_closing_lines_send_no_commands_to_a_terminal():
    said = format_summary(Path("runs/a/checkpoints/best.ckpt"), {}, "vlm generate --prompt '\0\x1b[2J'", [])
    assert said.splitlines()[-3:] == [
        r"try         vlm generate --prompt $'\x00\x1b[2J' -c runs/a/checkpoints/best.ckpt",
        "verdict     none, because the run was not tested. Test it with:",
        "            vlm evaluate -c runs/a/checkpoints/best.ckpt",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["\0", "\x1b[2J\n", "\0 a\x1b b "])
def test_a_text_of_control_characters_trains_and_prints_none(text, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(text * 4000)
    small = ["model.size.dim=16", "model.size.num_heads=2", "model.size.depth=1", "data.max_len=16", "tokenizer=bytes"]
    small += ["trainer=cpu", "trainer.max_steps=2", "data.num_workers=0", "callbacks.progress=null"]
    data = ["data=text", f"data.path={tmp_path / 'text.txt'}", "task.sampled_batches=2", "data.train_samples=64"]
    assert main(["task=language_modeling", *data, *small, f"runs={tmp_path / 'runs'}"]) == 0
    said = capsys.readouterr().out
    assert "try         vlm generate --prompt" in said and said.replace("\n", "").isprintable()


def test_the_columns_of_a_table_are_explained():
    assert column_note({"test/loss": 1.0, "test/accuracy": 0.5}) == ""
    scores = [f"test/accuracy{place}" for place in ("", "@low", "@high", "@bag", "@constant", "@ceiling")]
    assert column_note(dict.fromkeys([*scores, "test/loss@sampled"], 0.5)) == (
        "(low, high: 95% interval; constant, bag: baselines that a model should exceed; ceiling: best possible "
        "score; sampled: estimate from random batches)"
    )
    assert column_note({"test/bleu@dictionary": 1.0}) == "(dictionary: baseline that a model should exceed)"
