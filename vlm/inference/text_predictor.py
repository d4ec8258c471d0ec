"""Predictors whose models read or write texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm.data.batch import InputRows
from vlm.data.text.inputs import Input
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.inference.info import tokenizer_line
from vlm.inference.predictor import Predictor
from vlm.inference.text.text_rows import encoded_rows


class TextPredictor(Predictor):
    """A predictor with the tokenizer that its model was trained with; arguments as in Predictor.

    Attributes:
        form: The format of its prompts; None for a model without one.
    """

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.tokenizer = tokenizer_from_state(about["tokenizer"])
        self.form = PromptForm.of(about["form"]) if "form" in about else None

    @classmethod
    def describe(cls, about: Mapping[str, Any]) -> Iterator[str]:
        yield tokenizer_line(about["tokenizer"])
        yield from super().describe(about)
        if "form" in about:
            yield f"prompt      {PromptForm.of(about['form']).shown()!r}"

    def encoded(self, samples: Sequence[Sequence[Input]]) -> InputRows:
        """The rows of some samples, on the model's device."""
        return encoded_rows(samples, self.tokenizer.pad_id, self.device)
