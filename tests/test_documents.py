"""Documents: lines that fit a screen, links and pictures that are there, promises whose tests exist."""

import json
import re
from pathlib import Path

import pytest

from vlm.cli.main import run as vlm
from vlm.training.run.fit import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for folder in (".", "docs", "data") for path in sorted((ROOT / folder).glob("*.md"))]


def test_lines_fit_a_screen_and_links_lead_somewhere() -> None:
    long, missing = [], []
    for path in DOCUMENTS:
        text = path.read_text()
        long += [(path.name, n) for n, line in enumerate(text.splitlines(), start=1) if len(line) > 120]
        links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        missing += [(path.name, at) for at in links if "://" not in at and not (path.parent / at).exists()]
    assert (long, missing) == ([], [])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 170


def test_each_promise_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    named = re.findall(r"((?:\w+/)*test_\w+\.py)|::(test_\w+)", text)
    files = {file for file, _ in named if file}
    folders = (ROOT / "tests" / "reliability", ROOT / "tests")
    assert [file for file in sorted(files) if not any((folder / file).exists() for folder in folders)] == []
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    functions = {function for _, function in named if function}
    assert len(functions) > 50
    assert [name for name in sorted(functions) if f"def {name}(" not in sources] == []


def test_each_promise_names_a_test() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    promised = [part.split("\nNot promised")[0] for part in re.split(r"^## .*\n", text, flags=re.MULTILINE)[1:]]
    promises = [one for part in promised for one in re.split(r"^- ", part, flags=re.MULTILINE)[1:]]
    assert len(promises) > 60
    assert [one for one in promises if "test_" not in one] == []


def test_the_walkthrough_names_code_that_exists() -> None:
    text = (ROOT / "docs" / "walkthrough.md").read_text()
    files = set(re.findall(r"`(vlm/[\w/]+\.py)`", text))
    assert len(files) >= 10
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []


GROUPS = ("task", "data", "model", "model/encoder", "model/decoder", "model/fusion", "model/position", "model/adapt")
GROUPS += ("optim", "tokenizer", "trainer", "schedule", "logger", "callbacks", "debug")


@pytest.mark.parametrize("group", GROUPS)
def test_the_page_on_configuration_names_every_option(group) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    options = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")} - {"default"}
    options = {re.sub(r"_small$", "_tiny", option) for option in options}  # "there as `_small` too"
    assert options and not options - set(re.findall(r"(?<=[=` ])\w+", page))


@pytest.mark.slow
def test_the_page_on_metrics_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its class and its command as they are written: Cohen's kappa is in each file of scores and chooses the best."""
    page = (ROOT / "docs" / "own-metric.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^PYTHONPATH=\. vlm train (task=.*?)\n```", page, re.DOTALL | re.MULTILINE)
    (evaluation, resuming) = re.findall(r"^PYTHONPATH=\. vlm (.* -c last .*|.* resume=last .*)$", page, re.MULTILINE)
    (tmp_path / "mymetrics.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    small = ["debug=fast", "trainer=cpu", "model.size.dim=32", "model.size.num_heads=2", "data.eval_batch_size=60"]
    assert main([*command.replace("\\\n", " ").split(), *small]) == 0
    (run,) = tmp_path.glob("runs/classification/20*")
    scores = json.loads((run / "evaluation" / "test" / "metrics.json").read_text())
    details = json.loads((run / "evaluation" / "test" / "details.json").read_text())
    assert scores["test/kappa"] == pytest.approx(kappa(details["confusion"]), abs=1e-9)
    assert (
        "val/kappa" in (run / "metrics.csv").read_text()
        and "kappa" in (run / "evaluation/test/report.html").read_text()
    )
    best = str(run / "checkpoints" / "best.ckpt")
    assert vlm(["classify", str(ROOT / "data" / "sample"), "-c", best]) == 0
    assert vlm(["evaluate", "-c", best, "--trust", "mymetrics", "--out", "scores"]) == 0
    assert json.loads((tmp_path / "scores" / "metrics.json").read_text()).keys() == scores.keys()
    assert vlm(evaluation.split()) == 0 and main(resuming.split()[1:]) == 0


def kappa(confusion: list[list[int]]) -> float:
    """Cohen's kappa, by its definition."""
    count, classes = sum(map(sum, confusion)), range(len(confusion))
    agreed = sum(confusion[n][n] for n in classes) / count
    chance = sum(sum(confusion[n]) * sum(row[n] for row in confusion) for n in classes) / count**2
    return (agreed - chance) / (1 - chance)
