"""Documents: lines that fit a screen, links and pictures that are there, promises whose tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [path for folder in (".", "docs", "data") for path in sorted((ROOT / folder).glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_lines_fit_a_screen(path: Path) -> None:
    long = [number for number, line in enumerate(path.read_text().splitlines(), start=1) if len(line) > 120]
    assert long == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    missing = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert missing == []


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
