"""Pairs of captions of drawn scenes with equal or different meaning: a generated task on two texts."""

from itertools import product

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.drawn import DrawnSource, Keys
from vlm.data.shapes.scene_source import assign, check_scenes
from vlm.data.shapes.scenes import Kind
from vlm.errors import Count, UserError
from vlm.randomness import numpy_rng

INVERSE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
CLASSES = ("different", "same")
OTHER_RELATION = 0.15  # share of different pairs with an unrelated relation, which a bag of words could detect


def relation_caption(one: Kind, relation: str, other: Kind) -> str:
    return f"a {one} {relation} a {other}"


def second(one: Kind, relation: str, other: Kind, same: bool, rng: np.random.Generator) -> str:
    """A caption with the same meaning, the other way round, or one with another meaning.

    Most of the latter have the same words as a caption with the same meaning: the kinds or parts of their looks are
    exchanged.
    """
    inverse = INVERSE[relation]
    if same:
        return relation_caption(other, inverse, one)
    if rng.random() < OTHER_RELATION:
        wrong = [name for name in INVERSE if name != inverse]
        return relation_caption(other, wrong[int(rng.integers(len(wrong)))], one)
    if rng.random() < 0.5:
        return relation_caption(one, inverse, other)
    one, other = swap_part(one, other, rng)
    return relation_caption(other, inverse, one)


def swap_part(one: Kind, other: Kind, rng: np.random.Generator) -> tuple[Kind, Kind]:
    """The kinds with size, colour or shape exchanged, one in which they differ."""
    differing = [at for at in range(3) if one[at] != other[at]]
    at = differing[rng.integers(len(differing))]
    parts = list(one), list(other)
    parts[0][at], parts[1][at] = other[at], one[at]
    return Kind(*parts[0]), Kind(*parts[1])


class ScenePairs(DrawnSource):
    """Pairs of captions; splits share no pair of kinds in their first captions.

    Args:
        seed, shapes, colors, sizes: See `vlm.data.shapes.scene_source.SceneSource`.
        train_pairs, val_pairs, test_pairs: Number of pairs per split (and epoch).
    Raises:
        UserError: A name is unknown or repeated, or there are too few kinds.
    """

    holds = ("text", "label")
    name = "pairs of captions"
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
        super().__init__(seed, {"train": train_pairs, "val": val_pairs, "test": test_pairs})
        check_scenes(shapes=shapes, colors=colors, sizes=sizes)
        self._dealt = assign([Kind(*parts) for parts in product(sizes, colors, shapes)], 2, seed)
        if not all(self._dealt.values()):
            raise UserError("data.source: too few kinds for three splits; add to data.source.shapes or .colors")

    def sample(self, keys: Keys) -> Record:
        """A pair. Classes alternate, so that both have the same frequency."""
        rng, label = numpy_rng("pair of captions", keys.seed, keys.id), keys.place % 2
        combinations = self._dealt[keys.split]
        kinds = combinations[int(rng.integers(len(combinations)))]
        one, other = (kinds[at] for at in rng.permutation(2))
        relation = tuple(INVERSE)[rng.integers(len(INVERSE))]
        text, pair = relation_caption(one, relation, other), second(one, relation, other, bool(label), rng)
        return keys.record({"text": text, "pair": pair, "label": label, "class": CLASSES[label]})
