"""The site of docs/: it builds without a warning, asks nothing of other places, and its snippets run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LECTURES = ROOT / "docs" / "lectures.md"
CONCEPTS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", LECTURES.read_text(), re.MULTILINE | re.DOTALL))
SNIPPETS = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in CONCEPTS.items()}


@pytest.mark.sample(plain=2, slow=4)
@pytest.mark.parametrize("name", [name for name in SNIPPETS if SNIPPETS[name]])
def test_the_snippets_of_the_lectures_run(name: str) -> None:
    for code in SNIPPETS[name]:
        exec(compile(code, str(LECTURES), "exec"), {})


def test_the_lectures_name_code_that_exists() -> None:
    text = LECTURES.read_text()
    files = sorted(set(re.findall(r"`(vlm/[\w/]+\.py)`", text)))
    sources = "\n".join((ROOT / file).read_text() for file in files)
    assert len(CONCEPTS) >= 14 and len(files) >= 10
    names = set(re.findall(r"`([A-Z]\w+|\w+_\w+)`", text)) - {"layer_decay"}
    assert [name for name in sorted(names) if not re.search(rf"(class|def) {name}\b", sources)] == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    navigation = yaml.safe_load(text[text.index("nav:") :])["nav"]
    pages = set(re.findall(r"'([\w-]+\.md)'", str(navigation)))
    assert pages == {path.name for path in (ROOT / "docs").glob("*.md")} | {"data.md"}


def test_links_from_the_page_on_data_stay_inside_the_site() -> None:
    pytest.importorskip("mkdocs")
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        from hooks import on_page_markdown
    finally:
        sys.path.pop(0)
    text = on_page_markdown((ROOT / "data" / "README.md").read_text())
    assert "../" not in "".join(re.findall(r"\]\(([^)]*)\)", text))


@pytest.mark.slow
def test_it_builds_and_asks_nothing_of_other_places(tmp_path: Path) -> None:
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text()):
            assert not re.search(r"(src|href)=[\"']?(https?:)?//", tag), (page, tag)
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", style.read_text()), style
