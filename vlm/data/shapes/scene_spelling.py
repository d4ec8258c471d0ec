"""Sentences about scenes with spelling mistakes and their corrections: generated pairs of texts."""

from typing import Unpack

import numpy as np

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.german import FORMS
from vlm.data.shapes.scene_source import SceneOptions, SceneSource
from vlm.data.shapes.scenes import statements
from vlm.errors import Share
from vlm.randomness import numpy_rng

SHORTEST = 3  # minimum length of a word that may be misspelled
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class SceneSpelling(SceneSource):
    """One true statement per scene, misspelled ("text") and correct ("translation").

    Args:
        mistakes: Share of the words of three letters or more with a mistake.
        options: See SceneSource.
    """

    holds = ("image", "text", "translation")
    name = "misspelled scenes"

    def __init__(self, *, mistakes: Share = 0.3, **options: Unpack[SceneOptions]) -> None:
        super().__init__(**options)
        self.mistakes = mistakes

    def sample(self, keys: Keys) -> Record:
        scene = self.scene(keys)
        true, rng = statements(scene), numpy_rng("scene spelling", *keys)
        which, form = rng.random(2).tolist()
        right, _ = FORMS[int(form * len(FORMS))](true[int(which * len(true))])
        words = [
            misspelled(word, rng) if len(word) >= SHORTEST and rng.random() < self.mistakes else word
            for word in right.split()
        ]
        return keys.record({"text": " ".join(words), "translation": right}, scene)


def misspelled(word: str, rng: np.random.Generator) -> str:
    """Makes one mistake in a word: two letters are swapped, or one is left out, doubled or replaced."""
    kind, at = int(rng.integers(4)), int(rng.integers(len(word) - 1))
    if kind == 0 and word[at] != word[at + 1]:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    others = [letter for letter in LETTERS if letter != word[at]]
    return word[:at] + others[int(rng.integers(len(others)))] + word[at + 1 :]
