"""Images are found by name, and read ahead: the same images, messages and order as without, bounded, and soon over."""

import itertools
import threading
import time

import pytest
import torch
from PIL import Image

from vlm.data.images.image import ImageError, Preprocess
from vlm.errors import UserError
from vlm.inference.inputs import find_images, open_image, read_ahead

COUNT = 40


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    found = [folder / f"{n:02}.png" for n in range(COUNT)]
    for n, path in enumerate(found):
        Image.new("RGB", (9, 7 + n), (5 * n, 3 * n, n)).save(path)
    found[3].write_bytes(b"no image")
    found[17].write_bytes(found[16].read_bytes()[:40])
    found[COUNT - 1].unlink()
    return [str(path) for path in found]


def pixels_of(source):
    return Preprocess(image_size=8)(open_image(source))


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_nothing(paths, workers):
    alone = list(read_ahead(paths, pixels_of, 0, ahead=14))
    found = list(read_ahead(paths, pixels_of, workers, ahead=14))
    faults = [place for place, one in enumerate(alone) if isinstance(one, ImageError)]
    assert faults == [3, 17, COUNT - 1] and all(paths[place] in str(alone[place]) for place in faults)
    for one, other in zip(found, alone, strict=True):
        same = str(one) == str(other) if isinstance(other, ImageError) else torch.equal(one, other)
        assert same


def test_no_more_is_read_ahead_than_asked_for(paths):
    count, lock = 0, threading.Lock()

    def prepare(path):
        nonlocal count
        with lock:
            count += 1
        return torch.zeros(1)

    values = read_ahead(paths[4:16] * 20, prepare, 2, ahead=8)
    for taken in range(1, 21):
        next(values)
        if taken % 4 == 0:
            time.sleep(0.05)
            assert count <= taken + 2 * 4 + 8  # and what the last chunk holds besides
    values.close()


def test_who_stops_does_not_wait_for_what_was_asked_for(paths):
    stopped, turn = threading.Event(), itertools.count()

    def prepare(path):
        if path != paths[4]:
            stopped.wait(60)
        next(turn)
        return torch.zeros(1)

    threads, begun = threading.active_count(), time.monotonic()
    values = read_ahead([paths[4]] * 8 + [paths[5]] * 500, prepare, 2, ahead=8)
    next(values)
    values.close()  # as an interrupt does
    assert time.monotonic() - begun < 30
    stopped.set()
    while threading.active_count() > threads and time.monotonic() - begun < 60:
        time.sleep(0.02)
    assert threading.active_count() <= threads
    assert next(turn) < 100


def test_what_is_no_fault_of_an_image_is_not_hidden(paths):
    def prepare(path):
        raise ZeroDivisionError

    for workers in (0, 2):
        with pytest.raises(ZeroDivisionError):
            next(read_ahead(paths, prepare, workers, ahead=8))


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
