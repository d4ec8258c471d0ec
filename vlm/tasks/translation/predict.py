"""Translating texts with a trained model."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_text
from vlm.data.text.words import to_single_line
from vlm.errors import UserError
from vlm.inference.arguments import LineArguments
from vlm.inference.options import WritingOptions
from vlm.inference.predictor import Stored, check_outputs
from vlm.inference.writing import Writer
from vlm.models.context import Context
from vlm.models.encoder_decoder import TextToText


def encode_texts(model: TextToText, texts: InputRows, **extra_inputs: Tensor) -> Context:
    """Encodes B texts in the precision of the weights: states (B, S, D).

    Args:
        extra_inputs: Further inputs of the model.
    """
    with torch.autocast(texts.tokens.device.type, enabled=False):
        return model.encode(texts.tokens, texts.segments, texts.types, texts.layout, **extra_inputs)


class Translator(Writer):
    """A trained translation model, ready to use; arguments as in Predictor."""

    task = "translation"
    fields, names = ("translation",), ("text", "translation")
    arguments = LineArguments
    stored: ClassVar[Stored] = {"max_len": int}
    max_len: int
    model: TextToText

    def check(self) -> None:
        begin = torch.tensor([[self.tokenizer.bos_id]], device=self.device)
        hidden = self.model.decoder(begin, None, self.encode([self.blank()]))
        check_outputs(self.model.head(hidden), self.tokenizer.vocab_size, "tokens")

    def blank(self) -> Any:
        """Returns a prepared input without content."""
        return ""

    @torch.inference_mode()
    def encode(self, inputs: Sequence[Any]) -> Context:
        return encode_texts(self.model, self.rows(inputs))

    def rows(self, texts: Sequence[str]) -> InputRows:
        """Encodes texts as rows on the model's device."""
        lines = (to_single_line(text, keep_no_break=True) for text in texts)
        return self.encode_rows([[encode_text(self.tokenizer, self.max_len, line)] for line in lines])

    def keys(self, inputs: Sequence[Any]) -> Sequence[str]:
        return inputs

    def notes(self, sources: Sequence[Any], options: WritingOptions) -> Iterator[str | UserError]:
        yield from super().notes(sources, options)
        room = self.max_len - 1 - len(self.tokenizer.read_begin)
        for number, text in enumerate(map(self.name_of, sources), start=1):
            if len(self.tokenizer.encode(text)) > room:
                line = f"text {number}: has more than the {room} tokens that the model reads"
                yield UserError(f"{line}; its end was left out")
