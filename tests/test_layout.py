"""The tests lie as the package does."""

from pathlib import Path

TESTS = Path(__file__).parent
OWN = {"helpers", "journeys", "reliability", "benchmarks"}  # helpers hold no tests; the others cross the whole package


def folders(root: Path) -> set[str]:
    """Folders that hold Python, relative to the root."""
    return {str(path.parent.relative_to(root)) for path in root.rglob("*.py")}


def test_every_folder_of_tests_is_one_of_the_package():
    ours = {folder for folder in folders(TESTS) if folder.split("/")[0] not in OWN}
    assert ours <= folders(TESTS.parent / "vlm")


def test_helpers_and_tests_lie_apart():
    """`pythonpath` names the helpers' folder alone."""
    strays = [path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest"))]
    assert all(path.is_relative_to(TESTS / "helpers") for path in strays)
    assert not [*TESTS.glob("helpers/**/test_*.py")]
