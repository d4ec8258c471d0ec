"""The base of predictors that choose among the classes that a checkpoint stores."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from vlm.inference.predictor import BatchPredictor, Stored, check_outputs


def read_classes(stored: Iterable[Iterable[str]]) -> list[str]:
    """Returns class names from a checkpoint's description; raises TypeError for values that are not strings."""
    return ["".join(name) for name in stored]


class ClassPredictor(BatchPredictor):
    """A predictor of classes; arguments as in Predictor.

    Attributes:
        classes: Names of the classes, in the order of the model's outputs.
        class_heading: Heading of the classes in `vlm info`.
    """

    stored: ClassVar[Stored] = {"classes": read_classes}
    classes: list[str]
    class_heading: ClassVar[str] = "classes"

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield from super().describe(about)
        yield cls.describe_classes(about)

    @classmethod
    def describe_classes(cls, about: Mapping[str, Any]) -> str:
        """Returns a line of `vlm info` on the classes."""
        return f"{cls.class_heading:<12}{', '.join(about['classes'])}"

    def check_classes(self, probabilities: Tensor) -> None:
        """Checks that the model has one output per class.

        Raises:
            UserError: The numbers differ.
        """
        check_outputs(probabilities, len(self.classes), "classes")
