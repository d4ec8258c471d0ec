"""English sentences about scenes with German translations: generated pairs of texts."""

from typing import Unpack

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.german import FORMS
from vlm.data.shapes.scene_source import SceneOptions, SceneSource
from vlm.data.shapes.scenes import statements
from vlm.errors import Share
from vlm.randomness import numpy_rng


class SceneTranslations(SceneSource):
    """One true statement per scene, in one of the forms of `vlm.data.shapes.german`.

    Args:
        hide_colors: Whether the English sentence says "colored" instead of each color, so that only the image shows it
            (Caglayan et al. 2019, "Probing the Need for Visual Context").
        omit_adjectives: Probability with which each size and colour is left out of both sentences, as in "a red circle
            left of a cross". Shorter sentences name no combination, so that some of a test occur in training too.
        options: See SceneSource.
    """

    holds = ("image", "text", "translation")
    name = "scenes in two languages"

    def __init__(
        self, *, hide_colors: bool = False, omit_adjectives: Share = 0.0, **options: Unpack[SceneOptions]
    ) -> None:
        super().__init__(**options)
        self._hidden = self.colors if hide_colors else []
        self.omit_adjectives = omit_adjectives

    def sample(self, keys: Keys) -> Record:
        scene = self.scene(keys)
        true = statements(scene)
        rng = numpy_rng("scene translation", *keys)
        which, form = rng.random(2).tolist()
        statement = true[int(which * len(true))].omit_adjectives(self.omit_adjectives, rng)
        english, german = FORMS[int(form * len(FORMS))](statement)
        text = " ".join("colored" if word in self._hidden else word for word in english.split())
        return keys.record({"text": text, "translation": german}, scene)
