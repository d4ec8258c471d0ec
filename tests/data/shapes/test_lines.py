"""Drawn lines: whole on their paper, of the asked length and noise."""

from itertools import product

import numpy as np
import pytest

from vlm.data.shapes.lines import FONTS, DrawnLines, Line, draw_line
from vlm.errors import UserError

LENGTHS = {"train_lines": 200, "val_lines": 100, "test_lines": 100}


def lines(split, count=100, **options):
    source = DrawnLines(seed=0, **{**LENGTHS, **options})
    return [source.split(split).record(index) for index in range(count)]


def texts(split, **options):
    return [record["captions"][0] for record in lines(split, **options)]


def test_texts_are_words_and_numbers_of_the_asked_length():
    found = texts("train", longest=5, numbers=0.5)
    assert max(map(len, found)) == 5 and all(text.isascii() and text.isalnum() for text in found)
    assert 35 < sum(text.isdigit() for text in found) < 65
    assert not any(text.isdigit() for text in texts("test", numbers=0.0))
    with pytest.raises(UserError, match="longest: 3 leaves too few"):
        DrawnLines(seed=0, longest=3, **LENGTHS)
    with pytest.raises(UserError, match=r"image_size: \[8, 128\] is too small"):
        DrawnLines(seed=0, image_size=(8, 128), **LENGTHS)
    with pytest.raises(UserError, match="16 is too small for 10 letters turned by 5 degrees; give more pixels"):
        DrawnLines(seed=0, image_size=16, **LENGTHS)


@pytest.mark.slow
def test_all_lines_of_the_smallest_images_fit():
    options = {"longest": 6, "turn": 20.0, "train_lines": 300}
    with pytest.raises(UserError, match="too small"):
        DrawnLines(seed=0, image_size=(24, 28), **{**LENGTHS, **options})
    for one in lines("train", 300, image_size=(24, 29), **options):
        one.image()


@pytest.mark.parametrize("font", FONTS)
def test_a_turned_text_stays_whole_on_its_paper(font):
    """As much ink as on the same paper in the middle, and none on the edge."""
    places, shapes = [(0.0, 0.0), (0.97, 0.04), (1.0, 1.0)], [(32, 128), (64, 64)]
    for turn, place, shape in product([-5.0, 0.0, 5.0], places, shapes):
        line = Line("qufumjum", font, 22, turn, place, 0, 255, (0.0, 0), shape)
        pixels, middle = (
            255 - np.asarray(draw_line(one).convert("L"), int) for one in (line, line._replace(place=(0.5, 0.5)))
        )
        assert pixels.shape == shape
        assert pixels.sum() == pytest.approx(middle.sum(), rel=0.02), line
        assert max(pixels[0].max(), pixels[-1].max(), pixels[:, 0].max(), pixels[:, -1].max()) < 64, line


def test_noise_is_as_strong_as_it_says():
    line = Line("a", "DejaVuSans", 16, 0.0, (0.5, 0.5), 0, 128, (12.0, 3), (32, 96))
    clean, noisy = (np.asarray(draw_line(one).convert("L"), float) for one in (line._replace(noise=(0.0, 3)), line))
    assert (noisy - clean)[clean == 128].std() == pytest.approx(12, rel=0.05)
