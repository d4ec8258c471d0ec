"""Pairs of captions of drawn scenes that say the same, or do not: a task of two texts that needs no files."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.scene_captions import assign, check_scenes
from vlm.data.shapes.scenes import Combination, Kind
from vlm.errors import Count, UserError
from vlm.randomness import numpy_rng

INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CLASSES = ("different", "same")
OTHER_RELATION = 0.15  # share of different pairs that a bag of words could tell, by a relation that is not the inverse


class PairSplit(Split):
    """One split: every pair is made when it is asked for, from nothing but its keys.

    Args:
        name: Name of the split, one of the keys of a sample.
        seed: Seed of the source.
        length: Number of pairs (of an epoch).
        combinations: The pairs of kinds that first captions tell of.
    """

    def __init__(self, *, name: str, seed: int, length: int, combinations: Sequence[Combination]) -> None:
        self.name, self.seed, self.fresh = name, seed, name == "train"
        self._length, self._combinations = length, combinations

    def __len__(self) -> int:
        return self._length

    def record(self, index: int, epoch: int = 0) -> Record:
        """A pair. The classes come in turn, so that both are as frequent in any number of pairs."""
        name, label = f"{self.name}-{epoch if self.fresh else 0}-{index:06d}", index % 2
        rng = numpy_rng("pair of captions", self.seed, name)
        kinds = self._combinations[int(rng.integers(len(self._combinations)))]
        one, other = (kinds[at] for at in rng.permutation(2))
        relation = tuple(INVERSE)[rng.integers(len(INVERSE))]
        text, pair = caption(one, relation, other), second(one, relation, other, bool(label), rng)
        return Record(name, {"text": text, "pair": pair, "label": label, "class": CLASSES[label]})


def caption(one: Kind, relation: str, other: Kind) -> str:
    return f"a {one} {relation} a {other}"


def second(one: Kind, relation: str, other: Kind, same: bool, rng: np.random.Generator) -> str:
    """A caption that says the same as that of these kinds, the other way round, or one that says something else.

    Most of the latter have the words of a caption that says the same: the kinds have changed places, or a part of
    their looks has.
    """
    inverse = INVERSE[relation]
    if same:
        return caption(other, inverse, one)
    if rng.random() < OTHER_RELATION:
        wrong = [name for name in INVERSE if name != inverse]
        return caption(other, wrong[int(rng.integers(len(wrong)))], one)
    if rng.random() < 0.5:
        return caption(one, inverse, other)
    one, other = swap_part(one, other, rng)
    return caption(other, inverse, one)


def swap_part(one: Kind, other: Kind, rng: np.random.Generator) -> tuple[Kind, Kind]:
    """The kinds with their size, colour or shape exchanged, one in which they differ."""
    differing = [at for at in range(3) if one[at] != other[at]]
    at = differing[rng.integers(len(differing))]
    parts = list(one), list(other)
    parts[0][at], parts[1][at] = other[at], one[at]
    return Kind(*parts[0]), Kind(*parts[1])


class ScenePairs(Source):
    """The source of all three splits; ``train`` has fresh pairs every epoch, ``val`` and ``test`` the same.

    No two splits share a pair of kinds in their first captions.

    Args:
        seed, shapes, colors, sizes: As in `vlm.data.shapes.scene_captions.Shapes`.
        train_pairs, val_pairs, test_pairs: How many pairs (an epoch of) each split has.
    Raises:
        UserError: A name is unknown or there twice, a number is too small, or there are too few kinds.
    """

    holds = ("text", "label")
    name = "pairs of captions"
    splits = NAMES
    drawn = True
    classes = CLASSES

    def __init__(
        self,
        *,
        seed: int,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        train_pairs: Count,
        val_pairs: Count,
        test_pairs: Count,
    ) -> None:
        check_scenes(image_size=64, shapes=shapes, colors=colors, sizes=sizes, lengths={})
        self.seed, self._lengths = seed, {"train": train_pairs, "val": val_pairs, "test": test_pairs}
        self._dealt = assign([Kind(*parts) for parts in product(sizes, colors, shapes)], 2, seed)
        if not all(self._dealt.values()):
            raise UserError("data.source: too few kinds for three splits; add to data.source.shapes or .colors")

    def open(self, name: str) -> PairSplit:
        return PairSplit(name=name, seed=self.seed, length=self._lengths[name], combinations=self._dealt[name])
