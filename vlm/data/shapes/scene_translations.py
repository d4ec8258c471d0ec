"""Sentences about scenes in English, each with its German translation: pairs of texts that need no files."""

from vlm.data.records import Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.german import FORMS
from vlm.data.shapes.scene_source import SceneSource
from vlm.data.shapes.scenes import statements
from vlm.randomness import numpy_rng


class SceneTranslations(SceneSource):
    """One of the true statements about each scene, in one of the forms of `vlm.data.shapes.german`."""

    holds = ("image", "text", "translation")
    name = "scenes in two languages"

    def sample(self, keys: Keys) -> Record:
        scene = self.scene(keys)
        true = statements(scene)
        which, form = numpy_rng("scene translation", *keys).random(2).tolist()
        english, german = FORMS[int(form * len(FORMS))](true[int(which * len(true))])
        return keys.record({"text": english, "translation": german}, scene)
