"""Words of captions of drawn scenes with tags: a generated tagging task."""

from collections.abc import Sequence
from functools import cached_property
from itertools import permutations
from typing import Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_pairs import INVERSE, relation_caption
from vlm.data.shapes.scene_source import KindOptions, SceneSource
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, valid_captions
from vlm.errors import Count
from vlm.randomness import numpy_rng

RELATIONS = ("left", "right", "of", "above", "below")
TAGS = dict.fromkeys(RADII, "size") | dict.fromkeys(COLORS, "colour") | dict.fromkeys(SHAPES, "shape")
TAGS |= dict.fromkeys(RELATIONS, "relation")


def tags_of(words: list[str]) -> list[str]:
    """The tag of each word of a caption: size, colour, shape, relation or other."""
    return [TAGS.get(word, "other") for word in words]


class SceneWords(SceneSource):
    """One tagged caption per scene.

    Args:
        train_captions, val_captions, test_captions: Number of captions per split (and epoch).
        object_weights, options: See SceneSource.
    """

    holds = ("text", "words", "tags")
    name = "words of captions"

    def __init__(
        self,
        *,
        train_captions: Count,
        val_captions: Count,
        test_captions: Count,
        object_weights: Sequence[float] = (1, 2, 1),
        **options: Unpack[KindOptions],
    ) -> None:
        scenes = {"train_scenes": train_captions, "val_scenes": val_captions, "test_scenes": test_captions}
        super().__init__(**scenes, object_weights=object_weights, **options)

    def sample(self, keys: Keys) -> Record:
        captions = valid_captions(self.scene(keys))
        words = captions[numpy_rng("words of a caption", *keys).integers(len(captions))].split()
        return keys.record({"text": " ".join(words), "words": words, "tags": tags_of(words)})

    def chances(self, words: Sequence[str | None]) -> list[dict[str, float]] | None:
        """Probability of each word in each gap, over all captions of one or two objects.

        All orders, sizes, colours, shapes and relations are equally likely, so all captions of a length are too.
        """
        if self.max_objects > 2:
            return None  # two relations of one subject are not equally likely in all combinations
        texts = self._captions.get(len(words), np.empty((0, len(words)), np.str_))
        for at, word in enumerate(words):
            texts = texts if word is None else texts[texts[:, at] == word]
        gaps = (texts[:, at] for at, word in enumerate(words) if word is None)
        counts = (np.unique(gap, return_counts=True) for gap in gaps)
        return [{str(word): int(number) / len(texts) for word, number in zip(*own, strict=True)} for own in counts]

    @cached_property
    def _captions(self) -> dict[int, np.ndarray]:
        """All captions of one and two objects, split into words, by number of words: (captions, words)."""
        pairs = ((one, relation, other) for one, other in permutations(self.kinds, 2) for relation in INVERSE)
        texts = [*(f"a {kind}" for kind in self.kinds), *(relation_caption(*parts) for parts in pairs)]
        by_length: dict[int, list[list[str]]] = {}
        for words in map(str.split, texts):
            by_length.setdefault(len(words), []).append(words)
        return {length: np.array(own) for length, own in by_length.items()}
