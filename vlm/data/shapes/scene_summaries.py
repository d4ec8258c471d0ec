"""Short stories about scenes with their summaries: generated pairs of texts."""

from collections import Counter
from typing import Unpack

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_questions import NUMBERS, plural
from vlm.data.shapes.scene_source import KindOptions, SceneSource
from vlm.data.shapes.scene_stories import Fact, tell
from vlm.errors import Count
from vlm.randomness import numpy_rng


class SceneSummaries(SceneSource):
    """One story per scene ("text") and its summary ("translation").

        the small red circle is above the large blue cross. the large red circle is left of the small red circle.
        two circles and a cross

    A story names an object once per relation, so a summary needs to recognise objects that were named before.

    Args:
        train_scenes, val_scenes, test_scenes: Number of stories per split (and epoch).
        options: See SceneSource.
    """

    holds = ("text", "translation")
    name = "summaries of scenes"

    def __init__(
        self, *, train_scenes: Count, val_scenes: Count, test_scenes: Count, **options: Unpack[KindOptions]
    ) -> None:
        super().__init__(
            train_scenes=train_scenes,
            val_scenes=val_scenes,
            test_scenes=test_scenes,
            object_weights=(0, 1, 3),  # a single object has no relations
            **options,
        )

    def sample(self, keys: Keys) -> Record:
        facts = tell(self.scene(keys), numpy_rng("summary of a scene", *keys))
        return keys.record({"text": " ".join(map(str, facts)), "translation": summary(facts)})


def summary(facts: list[Fact]) -> str:
    """The number of objects of each shape in a story, in order of their first mention."""
    kinds = dict.fromkeys(kind for fact in facts for kind in (fact.subject, fact.other))
    counts = Counter(kind.shape for kind in kinds)
    parts = [f"a {shape}" if count == 1 else f"{NUMBERS[count]} {plural(shape)}" for shape, count in counts.items()]
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
