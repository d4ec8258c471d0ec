"""Words of captions of drawn scenes with their kinds: a task of tagging that needs no files."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import permutations
from typing import Unpack

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_pairs import INVERSE, caption
from vlm.data.shapes.scene_source import KindOptions, SceneSource
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, valid_captions
from vlm.errors import Count
from vlm.randomness import numpy_rng

RELATIONS = ("left", "right", "of", "above", "below")
TAGS = dict.fromkeys(RADII, "size") | dict.fromkeys(COLORS, "colour") | dict.fromkeys(SHAPES, "shape")
TAGS |= dict.fromkeys(RELATIONS, "relation")


def tags_of(words: list[str]) -> list[str]:
    """The kind of each word of a caption: size, colour, shape, relation, or other."""
    return [TAGS.get(word, "other") for word in words]


class SceneWords(SceneSource):
    """A caption of each scene.

    Args:
        train_captions, val_captions, test_captions: How many captions (an epoch of) each split has.
        options: As SceneSource takes them.
    """

    holds = ("text", "words", "tags")
    name = "words of captions"

    def __init__(
        self, *, train_captions: Count, val_captions: Count, test_captions: Count, **options: Unpack[KindOptions]
    ) -> None:
        super().__init__(train_scenes=train_captions, val_scenes=val_captions, test_scenes=test_captions, **options)

    def sample(self, keys: Keys) -> Record:
        captions = valid_captions(self.scene(keys))
        words = captions[numpy_rng("words of a caption", *keys).integers(len(captions))].split()
        return keys.record({"text": " ".join(words), "words": words, "tags": tags_of(words)})

    def likeliest(self, words: Sequence[str | None]) -> list[float] | None:
        """The chance of the likeliest word in each gap, over all captions of one or two objects.

        No order, size, colour, shape or relation is preferred, so that all captions of a length are equally likely.
        """
        if self.max_objects > 2:
            return None  # two relations of one subject are not equally likely in all combinations
        known = [(at, word) for at, word in enumerate(words) if word is not None]
        fitting = [
            caption for caption in self._captions.get(len(words), []) if all(caption[at] == w for at, w in known)
        ]
        gaps = [at for at, word in enumerate(words) if word is None]
        counts = [Counter(text[at] for text in fitting) for at in gaps]
        return [max(count.values(), default=0) / max(1, len(fitting)) for count in counts]

    @cached_property
    def _captions(self) -> dict[int, list[list[str]]]:
        """All captions of one and of two objects in words, by their number."""
        pairs = ((one, relation, other) for one, other in permutations(self.kinds, 2) for relation in INVERSE)
        texts = [*(f"a {kind}" for kind in self.kinds), *(caption(*parts) for parts in pairs)]
        by_length: dict[int, list[list[str]]] = {}
        for words in map(str.split, texts):
            by_length.setdefault(len(words), []).append(words)
        return by_length
