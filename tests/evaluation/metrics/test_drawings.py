"""Shares of pictures in which judges find their caption, with controls, by hand."""

import numpy as np
import pytest

from vlm.errors import UserError
from vlm.evaluation.metrics.drawings import CEILING, RANDOM, DrawingMetric, JudgedPicture


def judged_picture(id: str, caption: str, one: list[str], many: list[str]) -> JudgedPicture:
    return JudgedPicture(id, caption, [caption, "x"], {"first": one, "second": many})


PICTURES = [
    judged_picture("1", "a", ["a"], ["b", "a"]),
    judged_picture("2", "b", ["a"], ["b"]),
    judged_picture("3", "c", ["x"], []),
    judged_picture("4", "d", ["d", "e"], ["c"]),
]


def test_shares_are_of_pictures_in_which_a_judge_finds_the_caption() -> None:
    metric = DrawingMetric()
    metric.update(PICTURES[2:])
    metric.update(PICTURES[:2])
    metric.update(PICTURES[:1])  # again, as a sampler that fills a batch does
    metric.update(
        [picture._replace(found={"first": [picture.caption], "second": ["z"]}) for picture in PICTURES], CEILING
    )
    metric.update([PICTURES[3]._replace(found={"first": ["d"], "second": ["d"]})], RANDOM)
    assert metric.compute() == {"first": 0.5, "second": 0.5}
    assert [picture.id for picture in metric.pictures] == ["1", "2", "3", "4"] and metric.judges == ["first", "second"]
    # Of another caption: 1 is judged by the picture of 2, 3 by that of 4, and 4 by that of 1.
    assert metric.controls() == {
        **{"first@shuffled": 0.25, "second@shuffled": 0.25},
        **{"first@random": 1.0, "second@random": 1.0},
        **{"first@ceiling": 1.0, "second@ceiling": 0.0},
    }
    ends = metric.intervals(seed=0)
    assert ends["first@low"] < 0.5 < ends["first@high"]
    model, baseline, count = metric.scorers("second", "shuffled")
    assert count == 4 and model(np.ones((1, 4))).item() == 0.5 and baseline(np.ones((1, 4))).item() == 0.25
    assert metric.details()["4"] == {
        **{"caption": "d", "references": ["d", "x"], "found": {"first": ["d", "e"], "second": ["c"]}},
        "matches": {"first": True, "second": False},
    }


def test_without_pictures_or_with_one_there_is_no_other() -> None:
    with pytest.raises(UserError, match="no picture to judge"):
        DrawingMetric().compute()
    metric = DrawingMetric()
    metric.update(PICTURES[:1])
    assert metric.compute() == {"first": 1.0, "second": 1.0} and metric.controls() == {}
    unjudged = DrawingMetric()
    unjudged.update([JudgedPicture("1", "a", ["a"], {})])
    assert unjudged.compute() == {} and unjudged.judges == []
