"""The notebook of the documents runs from beginning to end where it lies, and shows what is stored in it."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "quickstart.ipynb"


def list_shown(notebook, kind: str) -> list[str]:
    """What its cells show as their values, of a MIME type."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output["data"][kind] for output in outputs if kind in output.get("data", {})]


@pytest.mark.nightly  # test_shipped.py runs the lines of Python of the README in a slow run
def test_the_quickstart_runs() -> None:
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("nbclient").NotebookClient
    stored, notebook = (pytest.importorskip("nbformat").read(NOTEBOOK, 4) for _ in range(2))
    client(notebook, timeout=1800, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    assert len(list_shown(notebook, "image/png")) == len(list_shown(stored, "image/png")) == 2
    first, *_, last = (list_shown(notebook, "text/plain")[at] for at in (1, 3, -1))
    assert "'a large red circle'" in first and "'cider'" in last
    assert last == list_shown(stored, "text/plain")[-1]
