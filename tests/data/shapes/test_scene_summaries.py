"""Summaries of stories: each counts the objects of its scene."""

import re
from collections import Counter

from vlm.data.shapes.scene_summaries import SceneSummaries
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES

OPTIONS = {"shapes": list(SHAPES)[:5], "colors": list(COLORS)[:3], "sizes": list(RADII), "seed": 0}
OPTIONS |= {"train_scenes": 300, "val_scenes": 50, "test_scenes": 50}
NUMBERS = {"a": 1, "two": 2, "three": 3}


def test_a_summary_counts_the_objects_of_its_story():
    source = SceneSummaries(**OPTIONS)
    for record in [record for split in source.splits for record in source.split(split).records()]:
        shapes = Counter(name.split()[-1] for name in set(re.findall(r"the (\w+ \w+ \w+)", record["text"])))
        parts = [part.split() for part in re.split(", | and ", record["translation"])]
        said = {re.sub("(?<=s)es$|(?<=[^s])s$", "", noun): NUMBERS[number] for number, noun in parts}
        assert said == shapes and 2 <= shapes.total() <= 3
        assert len(record["translation"]) < len(record["text"])
