"""A predictor's results of inputs, as Python gets them."""

from typing import Any

from vlm.inference.options import checked
from vlm.inference.predictor import Predictor
from vlm.inference.use import answers


def used(predictor: Predictor, inputs: Any, **values: Any) -> list[Any]:
    several, _ = predictor.arguments.several(inputs)
    return answers(predictor, several, checked(predictor.options, values, use="this"))
