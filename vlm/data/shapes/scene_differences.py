"""Questions about two scenes of coloured shapes that differ in one thing."""

from functools import partial

import numpy as np

from vlm.data.records import Question, Record, Split
from vlm.data.shapes.scene_captions import ShapesSplit
from vlm.data.shapes.scene_questions import SceneQuestions
from vlm.data.shapes.scenes import Kind, Scene, draw
from vlm.randomness import numpy_rng


class SceneDifferences(SceneQuestions):
    """Two scenes a record: in the second, one object has another colour or shape.

        difference  what differs?                              a small red cross became a small blue cross
        place       which scene has a small blue cross?        the second

    The first scene's combination of objects is in no other split.

    Args:
        others: As in SceneQuestions; questions_per_kind counts those of place.
    Raises:
        UserError: As in SceneQuestions.
    """

    name = "differences of scenes"

    def open(self, name: str) -> Split:
        return DifferencesSplit(self, self._source.open(name))


class DifferencesSplit(Split):
    """Pairs of scenes of a split with questions, drawn from nothing but their keys."""

    def __init__(self, source: SceneDifferences, scenes: ShapesSplit) -> None:
        self.source, self.scenes, self.fresh = source, scenes, scenes.fresh

    def __len__(self) -> int:
        return len(self.scenes)

    def record(self, index: int, epoch: int = 0) -> Record:
        scene, name = self.scenes.scene(epoch, index), self.scenes.name_of(epoch, index)
        rng = numpy_rng("differences of scenes", self.source.seed, name)
        at = int(rng.integers(len(scene.objects)))
        old = scene.objects[at].kind
        new = self._other(old, {kind for kind, _, _ in scene.objects}, rng)
        objects = (*scene.objects[:at], scene.objects[at]._replace(kind=new), *scene.objects[at + 1 :])
        second = Scene(objects, scene.background, scene.image_size)
        questions = [Question("what differs?", f"a {old} became a {new}", "difference")]
        for number in range(self.source.questions_per_kind if self.fresh else 1):
            later = (number + int(rng.integers(2))) % 2
            answer = ("the first", "the second")[later]
            questions.append(Question(f"which scene has a {(old, new)[later]}?", answer, "place"))
        known = {"questions": list(dict.fromkeys(questions))}
        scenes = [partial(draw, one) for one in (scene, second)]
        return Record(name, known, scenes[0], None, lambda: f"{scene} {second}", scenes[1:])

    def _other(self, kind: Kind, there: set[Kind], rng: np.random.Generator) -> Kind:
        """A kind of another colour or shape that is not in the scene; of the same size, so that places stay clear."""
        colored = [kind._replace(color=color) for color in self.source.colors]
        shaped = [kind._replace(shape=shape) for shape in self.source.shapes]
        among = [other for other in colored + shaped if other not in there]
        return among[rng.integers(len(among))]
