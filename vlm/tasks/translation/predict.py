"""Translating texts with a trained model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vlm.data.batch import InputRows
from vlm.data.text.inputs import encode_text
from vlm.data.text.words import one_line
from vlm.errors import UserError
from vlm.inference.inputs import LineArguments
from vlm.inference.options import WritingOptions
from vlm.inference.predictor import check_outputs
from vlm.inference.writing import Writer
from vlm.models.context import Context
from vlm.models.encoder_decoder import TextToText


def encode_texts(model: TextToText, texts: InputRows, **beside: Tensor) -> Context:
    """Encodes B texts in the precision of the weights: states (B, S, D).

    Args:
        beside: Further inputs of the model.
    """
    with torch.autocast(texts.tokens.device.type, enabled=False):
        return model.encode(texts.tokens, texts.segments, texts.types, texts.layout, **beside)


class Translator(Writer):
    """A trained translation model, ready to use; arguments as in Predictor."""

    task = "translation"
    fields, names = ("translation",), ("text", "translation")
    arguments = LineArguments
    model: TextToText

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self.max_len = int(about["max_len"])

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
        samples = [[encode_text(self.tokenizer, self.max_len, one_line(text, keep_no_break=True))] for text in texts]
        return self.encoded(samples)

    def keys(self, inputs: Sequence[Any]) -> Sequence[str]:
        return inputs

    def notes(self, sources: Sequence[Any], options: WritingOptions) -> Iterator[str | UserError]:
        yield from super().notes(sources, options)
        room = self.max_len - 1 - len(self.tokenizer.read_begin)
        for number, text in enumerate(map(self.name_of, sources), start=1):
            if len(self.tokenizer.encode(text)) > room:
                line = f"text {number}: has more than the {room} tokens that the model reads"
                yield UserError(f"{line}; its end was left out")
