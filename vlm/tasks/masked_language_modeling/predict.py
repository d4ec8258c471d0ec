"""Filling in the gaps of texts with a trained model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vlm.checkpoint.stored import Metadata
from vlm.data.batch import InputRows
from vlm.data.text.inputs import Input
from vlm.errors import UserError, excerpt
from vlm.inference.arguments import GAP, MaskedTextArguments
from vlm.inference.command_options import FillOptions
from vlm.inference.predictor import BatchPredictor, Rows, Stored, TextPredictor, check_outputs, encode_on_device
from vlm.models.text_encoder import MaskedLanguageModel

ROWS = 256  # rows at a time, each with one masked token


@torch.inference_mode()
def gap_probabilities(model: MaskedLanguageModel, rows: InputRows) -> Tensor:
    """Returns token probabilities in all gaps, for evaluation and `vlm fill`: (T, V), float64."""
    assert rows.places is not None
    hidden = model(rows.tokens, rows.segments, rows.types, rows.places)
    return model.head.logits(hidden).double().softmax(-1)


def pseudo_log_likelihood(
    model: MaskedLanguageModel, ids: Sequence[int], *, mask_id: int, device: torch.device | str
) -> float:
    """Returns the sum of log-probabilities of the inner tokens, each masked alone (Salazar et al. 2020)."""
    total = 0.0
    for start in range(1, len(ids) - 1, ROWS):
        places = range(start, min(start + ROWS, len(ids) - 1))
        rows = [Input([*ids[:at], mask_id, *ids[at + 1 :]], [0] * len(ids), [at]) for at in places]
        chances = gap_probabilities(model, encode_on_device([[row] for row in rows], 0, device))
        total += chances.gather(1, torch.tensor([[ids[at]] for at in places], device=chances.device)).log().sum().item()
    return total


@dataclass(frozen=True)
class FilledText:
    """A text with its gaps filled in.

    Args:
        text: The text with the likeliest word in each gap.
        gaps: Words of each gap with their probabilities, the likeliest first.
    """

    text: str
    gaps: tuple[dict[str, float], ...]


class GapFiller(BatchPredictor[str, Input, FilledText, FillOptions], TextPredictor):
    """A trained masked language model, ready to use; arguments as in Predictor. A gap is one token."""

    result = FilledText
    returns = "A FilledText object"
    task = "masked_language_modeling"
    fields = ("text", "filled")
    options = FillOptions
    arguments = MaskedTextArguments
    stored: ClassVar[Stored] = {"max_len": int}
    max_len: int
    model: MaskedLanguageModel

    def restore(self, about: Metadata) -> None:
        super().restore(about)
        if (mask_id := self.tokenizer.mask_id) is None:
            raise UserError("the tokenizer has no mask token; use another checkpoint")
        self.mask_id = mask_id

    def check(self) -> None:
        check_outputs(self.probabilities([self.encode(GAP)]), self.tokenizer.vocab_size, "tokens")

    @classmethod
    def columns(cls, options: FillOptions) -> tuple[str, ...]:
        return cls.fields if options.top == 1 else (*cls.fields, "gaps")

    def prepare(self, source: str, options: FillOptions) -> Input:
        return self.encode(source)

    def predict(self, batch: Sequence[Input], options: FillOptions) -> list[FilledText]:
        values, places = self.probabilities(batch).topk(min(options.top, self.tokenizer.vocab_size))
        gaps = iter(zip(values.tolist(), places.tolist(), strict=True))
        results = []
        for row in batch:
            ids, words = list(row.ids), []
            for place in row.places:
                probabilities, best = next(gaps)
                ids[place] = best[0]
                words.append(self._words(probabilities, best))
            results.append(FilledText(self.tokenizer.decode(ids), tuple(words)))
        return results

    def record(self, source: str, result: FilledText, options: FillOptions, *, form: str = "jsonl") -> Rows:
        tops = "  ".join(f"{word} {value:.4f}" for gap in result.gaps for word, value in gap.items())
        return [{"text": source, "filled": result.text, "gaps": list(result.gaps) if form == "jsonl" else tops}]

    def encode(self, text: str) -> Input:
        """Encodes a text; a gap includes the white space before it, as pieces of words do.

        Raises:
            UserError: It has no gap, or is longer than the model reads.
        """
        first, *rest = text.split(GAP)
        if not rest:
            raise UserError(f"{excerpt(text)}: has no {GAP}; put it in place of each word to fill in")
        ids, places = [self.tokenizer.bos_id, *self.tokenizer.encode(first.rstrip())], []
        for number, part in enumerate(rest, start=1):
            places.append(len(ids))
            ids += [self.mask_id, *self.tokenizer.encode(part.rstrip() if number < len(rest) else part)]
        if len(ids) + 1 > self.max_len:
            sizes = f"has {len(ids) + 1} tokens, and the model reads {self.max_len}"
            raise UserError(f"{excerpt(text)}: {sizes}; shorten it")
        return Input([*ids, self.tokenizer.eos_id], [0] * (len(ids) + 1), places)

    def probabilities(self, rows: Sequence[Input]) -> Tensor:
        """Returns token probabilities (T, V) in all gaps of some texts."""
        return gap_probabilities(self.model, self.encode_rows([[row] for row in rows])).cpu()

    def _words(self, values: Sequence[float], ids: Sequence[int]) -> dict[str, float]:
        """Returns the likeliest words of a gap with probabilities; of tokens that differ in a space, the likelier."""
        words: dict[str, float] = {}
        for value, id in zip(values, ids, strict=True):
            words.setdefault(self.tokenizer.decode([id]).strip(), value)
        return words
