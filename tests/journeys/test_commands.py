"""What `vlm` says of itself, and what runs of three tasks leave behind."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from journey import best, results

from vlm import __version__
from vlm.checkpoint import load as ckpt
from vlm.cli.main import run as vlm


def test_the_bare_command_shows_its_help_and_a_wrong_one_is_named(capsys) -> None:
    assert vlm([]) == 2
    shown = capsys.readouterr()
    assert "check-data" in shown.out + shown.err and "error" not in shown.err
    assert vlm(["captoin"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and "captoin" in shown.err and len(shown.err.splitlines()) <= 2


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize("program", [["-m", "vlm"], ["-c", "from vlm.cli.main import main; main()"]])
def test_the_version_is_said(program) -> None:
    done = subprocess.run([sys.executable, *program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"vlm {__version__}\n"


@pytest.mark.sample(plain=1, slow=1)
@pytest.mark.parametrize(("line", "expected"), [("vlm cap", "caption"), ("vlm score --fo", "--format")])
def test_a_shell_completes_commands_and_options(line: str, expected: str) -> None:
    asked = {"_VLM_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    program = "import sys; sys.argv = ['vlm']; from vlm.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, **asked})
    assert done.stdout.split() == [f"plain,{expected}"]


SCORES = {
    "captioning": "bleu4 cider rouge_l exact_match distinct cider@constant cider@shuffled bleu4@constant length_ratio "
    "novelty cider@low cider@high bleu4@low loss@shuffled loss@blank",
    "classification": "accuracy top5 balanced_accuracy calibration_error accuracy@constant accuracy@low accuracy@high",
    "language_modeling": "loss@sampled perplexity word_perplexity bits_per_byte bits_per_byte@unigram "
    "bits_per_byte@low bits_per_byte@high",
}
KEPT = "last.ckpt best.ckpt config.yaml metrics.csv metrics.json predictions.json report.html"
RUNS = [
    ("trained", "captioning|VisionLanguageModel|ViT|SentencePieceTokenizer|Shapes|val/exact_match", "classes"),
    ("trained_classifier", "classification|Classifier|ShapeClasses|red circle, red cross, |val/accuracy", "tokenizer"),
    ("trained_text", "language_modeling|Decoder|SceneText|CharTokenizer|val/bits_per_byte", "preprocess"),
]


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize(("name", "holds", "lacks"), RUNS)
def test_a_run_leaves_its_folder_as_documented_and_info_says_what_its_file_holds(
    name, holds, lacks, request, capsys
) -> None:
    run: Path = request.getfixturevalue(name)
    task, *parts = holds.split("|")
    assert {path.name for path in run.rglob("*")} >= {*KEPT.split()}
    rows = list(csv.DictReader((run / "metrics.csv").open()))
    assert {"step", "epoch", "train/loss", "val/loss", parts[-1]} <= rows[0].keys()
    evaluation = run / "evaluation" / "test"
    expected = {f"test/{score}" for score in ["loss", *SCORES[task].split()]}
    found = results(evaluation).keys()
    assert found >= expected if task == "captioning" else found == expected
    picture = evaluation / "confusion.png"
    assert picture.exists() == (task == "classification")
    assert not picture.exists() or picture.read_bytes().startswith(b"\x89PNG")
    assert len(list((run / "samples").glob("step_*.jsonl"))) == (3 if task == "classification" else 2)
    written = {"captioning": {"image_id", "caption"}, "language_modeling": {"prompt", "text"}}
    assert results(evaluation, "predictions")[0].keys() >= written.get(task, {"image", "top"})
    capsys.readouterr()
    assert vlm(["info", "-c", best(run)]) == 0
    said = capsys.readouterr().out
    first = {line.split()[0]: line for line in said.splitlines() if not line.startswith(" ")}
    assert all(part in said for part in parts) and lacks not in first and first["task"].endswith(f" {task}")
    count = sum(tensor.numel() for tensor in ckpt.inference_weights(ckpt.read(best(run))).values())
    assert f"{count:,} parameters" in first["model"]
