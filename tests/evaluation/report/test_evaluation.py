"""The picture of a confusion matrix: it can be written for any number of classes, and the diagonal stands out."""

import warnings
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vlm.evaluation.report.content import Confusion
from vlm.evaluation.report.evaluation import MAX_LETTERS, _shorten, confusion_picture


def matrix(count, seed=0):
    draw = np.random.default_rng(seed)
    return draw.integers(0, 3, (count, count)) + np.diag(draw.integers(40, 900, count))


def draw_picture(counts, names):
    return Image.open(BytesIO(confusion_picture(Confusion(counts, names))))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 21, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 10, 20, 100, 300))])
def test_any_number_of_classes(count):
    image = draw_picture(matrix(count), [f"class {n}" for n in range(count)])
    assert image.format == "PNG" and 350 < min(image.size) <= max(image.size) < 2000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Glyph")
def test_odd_names_and_classes_without_samples():
    odd = ["$x_1$ & ", "犬", "", "a" * 500, "line\nbreak", "100 % {set}", "\\alpha $", "$\\nothing{$"]
    assert min(draw_picture(matrix(len(odd)), odd).size) > 350
    assert min(draw_picture(np.zeros((4, 4), dtype=int), list("abcd")).size) > 350


def test_the_share_of_the_true_class_is_the_colour():
    """Two cells of equal share look the same, however many samples their classes have; more is darker."""
    image = draw_picture(np.array([[90, 10], [4500, 4500]]), ["a", "b"])
    colors = dict(map(reversed, image.convert("RGB").getcolors(2**20)))
    cells = sorted((color for color, count in colors.items() if count > 5000 and color != (255, 255, 255)), key=sum)
    assert len(cells) == 3
    assert [colors[cell] > 1.5 * colors[cells[0]] for cell in cells] == [False, True, False]


def test_names_are_cut_in_the_middle():
    names = [_shorten(f"a rather long name of class {n}") for n in range(20)]
    assert len(set(names)) == 20
    assert max(map(len, names)) == MAX_LETTERS
    assert _shorten("daisy") == "daisy"


@pytest.mark.slow
def test_names_of_any_script_are_drawn_without_a_warning():
    names = ["\u65e5\u672c", "\x1b[31mred", "a\nb", "$x$", "\u202e"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        confusion_picture(Confusion(np.eye(len(names), dtype=int), names))
