"""Sentences about scenes in English, each with its German translation: pairs of texts that need no files."""

from collections.abc import Sequence
from functools import partial

from vlm.data.records import NAMES, Record, Source, Split
from vlm.data.shapes.german import FORMS
from vlm.data.shapes.scene_captions import Shapes, ShapesSplit
from vlm.data.shapes.scenes import draw, statements
from vlm.errors import Count
from vlm.randomness import numpy_rng


class SceneTranslations(Source):
    """Sentences about drawn scenes in two languages; no two splits share a combination of shapes.

    A sample is one of the true statements about a scene in one of the forms of `vlm.data.shapes.german`.

    Args:
        colors_told: Whether the English sentence tells the colours; else it calls each object colored, and only the
            image shows how (Caglayan et al. 2019, "Probing the Need for Visual Context").
        seed, image_size, shapes, colors, sizes, max_objects, object_weights, train_scenes, val_scenes, test_scenes: As
            in `vlm.data.shapes.scene_captions.Shapes`.
    Raises:
        UserError: As Shapes.
    """

    holds = ("image", "text", "translation")
    name = "scenes in two languages"
    splits = NAMES
    drawn = True

    def __init__(
        self,
        *,
        seed: int,
        image_size: Count = 64,
        shapes: list[str],
        colors: list[str],
        sizes: list[str],
        max_objects: Count,
        object_weights: list[float] | None = None,
        train_scenes: Count,
        val_scenes: Count,
        test_scenes: Count,
        colors_told: bool = True,
    ) -> None:
        self._hidden = () if colors_told else tuple(colors)
        self._shapes = Shapes(
            seed=seed,
            image_size=image_size,
            shapes=shapes,
            colors=colors,
            sizes=sizes,
            max_objects=max_objects,
            object_weights=object_weights or (1, 2, 1),
            train_scenes=train_scenes,
            val_scenes=val_scenes,
            test_scenes=test_scenes,
            captions_per_image=None,
        )

    def open(self, name: str) -> "SceneTranslationsSplit":
        return SceneTranslationsSplit(self._shapes.open(name), self._hidden)


class SceneTranslationsSplit(Split):
    """One split; every sample is a function of its keys alone.

    Args:
        scenes: The scenes that its sentences are about.
        hidden: English words that are "colored" instead.
    """

    def __init__(self, scenes: ShapesSplit, hidden: Sequence[str] = ()) -> None:
        self.scenes, self.hidden, self.fresh = scenes, hidden, scenes.fresh

    def __len__(self) -> int:
        return len(self.scenes)

    def record(self, index: int, epoch: int = 0) -> Record:
        epoch = epoch if self.fresh else 0
        scene = self.scenes.scene(epoch, index)
        true = statements(scene)
        rng = numpy_rng("scene translation", self.scenes.seed, self.scenes.name, epoch, index)
        which, form = rng.random(2).tolist()
        english, german = FORMS[int(form * len(FORMS))](true[int(which * len(true))])
        text = " ".join("colored" if word in self.hidden else word for word in english.split())
        known = {"text": text, "translation": german}
        return Record(f"{self.scenes.name}-{epoch}-{index:06d}", known, partial(draw, scene), None, lambda: str(scene))
