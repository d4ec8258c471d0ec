"""Conversations about drawn scenes in which texts have the boxes of objects, as location tokens."""

from typing import Annotated, NotRequired, Unpack

import numpy as np

from vlm.data.boxes import DETECT, LocationCodec
from vlm.data.records import Question, Record
from vlm.data.shapes.scene_questions import SceneConversations
from vlm.data.shapes.scene_source import Keys, SceneOptions
from vlm.data.shapes.scenes import Kind, Scene, find_box, list_statements
from vlm.data.text.tokenizer_base import LOCATION, MAX_LOCATIONS
from vlm.errors import Count, Range
from vlm.randomness import numpy_rng

DESCRIBE = "describe the image with boxes."
NOTHING = "nothing"


class GroundingOptions(SceneOptions):
    """Arguments of SceneConversations, which documents them and has their defaults."""

    questions_per_kind: NotRequired[Count]


class GroundedConversations(SceneConversations):
    """Scenes with the conversations of SceneConversations, and two kinds with boxes.

        detect    detect small red circle          <loc0012><loc0030><loc0025><loc0043> small red circle
        grounded  describe the image with boxes.   a small red circle <loc0012>... left of a large blue cross <...

    A third of the objects to detect are absent; the answer is then "nothing".

    Args:
        bins: Number of location tokens of a side; the last is the right or bottom edge.
        options: See SceneConversations.
    """

    name = "conversations about shapes with boxes"

    def __init__(self, *, bins: Annotated[int, Range(2, MAX_LOCATIONS)], **options: Unpack[GroundingOptions]) -> None:
        super().__init__(**options)
        self.bins = bins

    def sample(self, keys: Keys) -> Record:
        record, scene = super().sample(keys), self.scene(keys)
        rng, questions = numpy_rng("grounded conversations", keys.seed, keys.id), list(record["questions"])
        for _ in range(self.repeats(keys)):
            questions += [self.ask_box(scene, rng), self.describe_with_boxes(scene, rng)]
        record.values = {**record.values, "questions": list(dict.fromkeys(questions))}
        return record

    def ask_box(self, scene: Scene, rng: np.random.Generator) -> Question:
        """Where an object is; a third of the objects are absent."""
        boxes = self.find_boxes(scene)
        absent = [kind for kind in self.kinds if kind not in boxes]
        candidates = [*boxes] if rng.random() < 2 / 3 else absent
        kind = candidates[rng.integers(len(candidates))]
        return Question(f"{DETECT} {kind}", f"{boxes[kind]} {kind}" if kind in boxes else NOTHING, "detect")

    def describe_with_boxes(self, scene: Scene, rng: np.random.Generator) -> Question:
        """A caption in which the box of each object follows its name; all valid ones are right."""
        boxes, captions = self.find_boxes(scene), []
        for statement in list_statements(scene):
            caption = f"{statement.subject.with_article} {boxes[statement.subject]}"
            places = (f"{relation} {kind.with_article} {boxes[kind]}" for relation, kind in statement.places)
            captions.append(f"{caption} {' and '.join(places)}".rstrip())
        captions.sort()
        return Question(DESCRIBE, captions[rng.integers(len(captions))], "grounded", tuple(captions))

    def find_boxes(self, scene: Scene) -> dict[Kind, str]:
        """The names of the location tokens of each object: top, left, bottom and right edge."""
        side = scene.image_size
        codec = LocationCodec((side, side), self.bins, self.bins - 1)
        boxes = {}
        for placed in scene.objects:
            left, top, right, bottom = map(float, find_box(placed, side))
            boxes[placed.kind] = "".join(map(LOCATION.format, codec.encode((left, top, right, bottom))))
        return boxes
