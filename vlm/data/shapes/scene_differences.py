"""Questions about two scenes of coloured shapes that differ in one thing."""

from functools import partial

import numpy as np

from vlm.data.records import Question, Record
from vlm.data.shapes.drawn import Keys
from vlm.data.shapes.scene_questions import SceneQuestions
from vlm.data.shapes.scenes import Kind, draw
from vlm.randomness import numpy_rng


class SceneDifferences(SceneQuestions):
    """Two scenes per record: in the second, one object has another colour or shape.

        difference  what differs?                              a small red cross became a small blue cross
        place       which scene has a small blue cross?        the second

    The combination of objects in the first scene occurs in no other split.

    Args:
        questions_per_kind: Number of "place" questions per pair of training scenes; other splits have one.
        options: See SceneSource.
    """

    name = "differences of scenes"

    def sample(self, keys: Keys) -> Record:
        scene, rng = self.scene(keys), numpy_rng("differences of scenes", keys.seed, keys.id)
        at = int(rng.integers(len(scene.objects)))
        old = scene.objects[at].kind
        new = self._other(old, {kind for kind, _, _ in scene.objects}, rng)
        second = scene._replace(
            objects=(*scene.objects[:at], scene.objects[at]._replace(kind=new), *scene.objects[at + 1 :])
        )
        questions = [Question("what differs?", f"a {old} became a {new}", "difference")]
        for number in range(self.questions_per_kind if keys.split == "train" else 1):
            later = (number + int(rng.integers(2))) % 2
            answer = ("the first", "the second")[later]
            questions.append(Question(f"which scene has a {(old, new)[later]}?", answer, "place"))
        record = keys.record({"questions": list(dict.fromkeys(questions))}, scene)
        record.open_more, record.read_stamp = [partial(draw, second)], lambda: f"{scene} {second}"
        return record

    def _other(self, kind: Kind, there: set[Kind], rng: np.random.Generator) -> Kind:
        """Another kind of the same size that is not in the scene and differs in colour or shape."""
        colored = [kind._replace(color=color) for color in self.colors]
        shaped = [kind._replace(shape=shape) for shape in self.shapes]
        among = [other for other in colored + shaped if other not in there]
        return among[rng.integers(len(among))]
