"""The part of the site that lies outside docs/: data/README.md, as a page."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

OUTSIDE = "../data/README.md"


def on_files(files: Any, config: Any) -> Any:
    text = (Path(config["docs_dir"]) / OUTSIDE).read_text(encoding="utf-8")
    files.append(File.generated(config, "data.md", content=text))
    return files


def on_page_markdown(markdown: str, **page: Any) -> str:
    return markdown.replace(f"({OUTSIDE}", "(data.md").replace("(../docs/", "(")
