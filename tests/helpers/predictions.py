"""A predictor's results of inputs, as Python gets them."""

from typing import Any

from vlm.inference.options import build_options
from vlm.inference.predictor import Predictor
from vlm.inference.use import predict_answers


def predict_inputs(predictor: Predictor, inputs: Any, **values: Any) -> list[Any]:
    several, _ = predictor.arguments.from_python(inputs)
    return predict_answers(predictor, several, build_options(predictor.options, values, use="this"))
