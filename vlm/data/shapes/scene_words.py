"""Words of captions of drawn scenes with their kinds: a task of tagging that needs no files."""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import permutations, product

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scene_captions import Shapes, ShapesSplit
from vlm.data.shapes.scene_pairs import INVERSE, caption
from vlm.data.shapes.scenes import COLORS, RADII, SHAPES, Kind, valid_captions
from vlm.errors import Count
from vlm.randomness import numpy_rng

RELATIONS = ("left", "right", "of", "above", "below")
TAGS = dict.fromkeys(RADII, "size") | dict.fromkeys(COLORS, "colour") | dict.fromkeys(SHAPES, "shape")
TAGS |= dict.fromkeys(RELATIONS, "relation")


def tags_of(words: list[str]) -> list[str]:
    """The kind of each word of a caption: size, colour, shape, relation, or other."""
    return [TAGS.get(word, "other") for word in words]


class WordsSplit(Split):
    """One caption of each scene of a split.

    Args:
        name: Name of the split.
        scenes: The scenes.
    """

    def __init__(self, *, name: str, scenes: ShapesSplit) -> None:
        self.name, self.scenes, self.fresh = name, scenes, scenes.fresh

    def __len__(self) -> int:
        return len(self.scenes)

    def record(self, index: int, epoch: int = 0) -> Record:
        epoch = epoch if self.fresh else 0
        captions = valid_captions(self.scenes.scene(epoch, index))
        rng = numpy_rng("words of a caption", self.scenes.seed, self.name, epoch, index)
        words = captions[rng.integers(len(captions))].split()
        known = {"text": " ".join(words), "words": words, "tags": tags_of(words)}
        return Record(f"{self.name}-{epoch}-{index:06d}", known)


class SceneWords(Source):
    """The source of all three splits; ``train`` has fresh captions every epoch, ``val`` and ``test`` the same.

    No two splits share a combination of kinds.

    Args:
        seed, shapes, colors, sizes, max_objects: As in `vlm.data.shapes.scene_captions.Shapes`.
        train_captions, val_captions, test_captions: How many captions (an epoch of) each split has.
    Raises:
        UserError: As Shapes.
    """

    holds = ("text", "words", "tags")
    name = "words of captions"
    splits = NAMES
    drawn = True

    def __init__(
        self,
        *,
        seed: int,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        max_objects: Count,
        train_captions: Count,
        val_captions: Count,
        test_captions: Count,
    ) -> None:
        self._source = Shapes(
            seed=seed,
            shapes=shapes,
            colors=colors,
            sizes=sizes,
            max_objects=max_objects,
            train_scenes=train_captions,
            val_scenes=val_captions,
            test_scenes=test_captions,
            captions_per_image=None,
        )
        self._kinds = [Kind(*parts) for parts in product(sizes, colors, shapes)]
        self._most = max_objects

    def likeliest(self, words: Sequence[str | None]) -> list[float] | None:
        """The chance of the likeliest word in each gap, over all captions of one or two objects.

        No order, size, colour, shape or relation is preferred, so that all captions of a length are equally likely.
        """
        if self._most > 2:
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
        pairs = ((one, relation, other) for one, other in permutations(self._kinds, 2) for relation in INVERSE)
        texts = [*(f"a {kind}" for kind in self._kinds), *(caption(*parts) for parts in pairs)]
        by_length: dict[int, list[list[str]]] = {}
        for words in map(str.split, texts):
            by_length.setdefault(len(words), []).append(words)
        return by_length

    def open(self, name: str) -> WordsSplit:
        return WordsSplit(name=name, scenes=self._source.open(name))
