import pytest

from vlm.errors import UserError
from vlm.inference.inputs import find_images


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("b.jpg", "a.PNG", "notes.txt", "deep/er/c.jpeg", "od[d].jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "inputs, expected",
    [
        (["b.jpg", "a.PNG"], ["b.jpg", "a.PNG"]),
        (["."], ["a.PNG", "b.jpg", "deep/er/c.jpeg", "od[d].jpg"]),
        (["*.jpg"], ["b.jpg", "od[d].jpg"]),
        (["**/*.jpeg"], ["deep/er/c.jpeg"]),
        (["od[d].jpg"], ["od[d].jpg"]),  # a file whose name looks like a pattern
        (["b.jpg", ".", "b.jpg"], ["b.jpg", "a.PNG", "deep/er/c.jpeg", "od[d].jpg"]),
        (["gone.jpg", "notes.txt"], ["gone.jpg", "notes.txt"]),  # named by hand: reading them tells
    ],
)
def test_inputs_name_images(folder, inputs, expected):
    assert find_images(inputs) == expected


def test_a_list_may_have_the_line_ends_of_windows(monkeypatch):
    monkeypatch.setattr("sys.stdin", ["a.png\r\n", "b.png\n"])
    assert find_images(["-"]) == ["a.png", "b.png"]


@pytest.mark.parametrize("given", ["*.gif", "deep/empty"])
def test_inputs_that_name_no_image_are_refused(folder, given):
    (folder / "deep" / "empty").mkdir()
    with pytest.raises(UserError, match="no images found"):
        find_images(["b.jpg", given])
