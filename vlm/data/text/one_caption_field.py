"""The caption field of an encoder: one caption per image in training, all in evaluation."""

from collections.abc import Sequence

from vlm.data.batch import CaptionRow, InputRows
from vlm.data.fields import AugmentKey, CaptionField, TokenField
from vlm.data.records import Record
from vlm.data.text.inputs import Encoded, Input, input_rows
from vlm.randomness import key as hashed
from vlm.randomness import numpy_rng


class OneCaptionField(CaptionField):
    """One caption of each record, drawn by (seed, epoch, id).

    In evaluation, all captions of a record and then the same with shuffled words: a control that shows what a bag of
    words achieves.

    Args:
        others: See CaptionField.
    Shapes:
        InputRows of tokens (B, L), segments (B, L), places (T,): index of each caption's first token
    """

    paired = False
    open = TokenField.open  # an encoder does not distinguish languages

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            captions = list(self.references_of(record))
            bags = [_disordered(caption, record.id, number) for number, caption in enumerate(captions)]
            return CaptionRow([self.ids(caption) for caption in [*captions, *bags]], captions)
        captions, (seed, epoch, _, *copy) = list(self.texts_of(record)), key
        return CaptionRow([self.ids(captions[hashed("caption", seed, epoch, record.id, *copy) % len(captions)])])

    def collate(self, values: Sequence[CaptionRow]) -> InputRows:  # type: ignore[override]
        rows = ([Input(ids, [0] * len(ids), [0]) for ids in value.texts] for value in values)
        samples = [Encoded(row, value.references) for row, value in zip(rows, values, strict=True)]
        return input_rows(samples, self.tokenizer.pad_id)

    def length(self, record: Record) -> int:
        """Mean length of the captions, because one of them is read."""
        captions = self.texts_of(record)
        return round(sum(len(self.ids(caption)) for caption in captions) / len(captions))


def _disordered(caption: str, id: str, number: int) -> str:
    """The caption with shuffled words."""
    words = caption.split()
    order = numpy_rng("disordered", id, number).permutation(len(words))
    return " ".join(words[place] for place in order)
