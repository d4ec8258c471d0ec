"""Reading ahead: the same images, messages and order as without, bounded, and soon over."""

import itertools
import threading
import time

import pytest
import torch
from PIL import Image

from vlm.data.images.image import Preprocess, load_image
from vlm.inference.inputs import read_images

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


def everything(paths, workers, batch_size, capsys):
    found = list(read_images(paths, Preprocess(image_size=8), batch_size=batch_size, workers=workers))
    return found, capsys.readouterr().err


@pytest.mark.parametrize("batch_size", [1, 7, 64])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_change_nothing(paths, workers, batch_size, capsys):
    alone, errors = everything(paths, 0, batch_size, capsys)
    found, said = everything(paths, workers, batch_size, capsys)
    assert said == errors and [name in said for name in ("03.png", "17.png", "39.png")] == [True] * 3
    assert [batch[0] for batch in found] == [batch[0] for batch in alone]
    assert [batch[2] for batch in found] == [batch[2] for batch in alone]
    for (_, pixels, _), (_, others, _) in zip(found, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(pixels, others, strict=True))


def test_no_more_than_two_batches_are_read_ahead(paths):
    count, lock = 0, threading.Lock()

    def pixels(image):
        nonlocal count
        with lock:
            count += 1
        return torch.zeros(1)

    batches = read_images(paths[4:16] * 20, pixels, batch_size=4, workers=2)
    for taken in range(1, 6):
        next(batches)
        time.sleep(0.05)
        assert count <= 4 * taken + 2 * 4 + 8  # and what the last chunk holds besides
    batches.close()


def test_who_stops_does_not_wait_for_what_was_asked_for(paths):
    stopped, turn, free = threading.Event(), itertools.count(), load_image(paths[4]).tobytes()

    def pixels(image):
        if image.tobytes() != free:
            stopped.wait(60)
        next(turn)
        return torch.zeros(1)

    threads, begun = threading.active_count(), time.monotonic()
    batches = read_images([paths[4]] * 8 + [paths[5]] * 500, pixels, batch_size=8, workers=2)
    next(batches)
    batches.close()  # as an interrupt does
    assert time.monotonic() - begun < 30
    stopped.set()
    while threading.active_count() > threads and time.monotonic() - begun < 60:
        time.sleep(0.02)
    assert threading.active_count() <= threads
    assert next(turn) < 100


def test_what_is_no_fault_of_an_image_is_not_hidden(paths):
    def pixels(image):
        raise ZeroDivisionError

    for workers in (0, 2):
        with pytest.raises(ZeroDivisionError):
            next(read_images(paths, pixels, batch_size=4, workers=workers))
