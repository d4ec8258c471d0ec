"""The field of captions that an encoder reads: one of an image in training, all in evaluation."""

from collections.abc import Sequence

import torch

from vlm.data.batch import CaptionRow, InputRows, pack
from vlm.data.fields import AugmentKey, CaptionField
from vlm.data.records import Record
from vlm.randomness import key as hashed
from vlm.randomness import numpy_rng


class OneCaptionField(CaptionField):
    """One caption of each record, drawn by (seed, epoch, id).

    In evaluation a row holds all captions of a record end to end, then the same with their words in another order: a
    control that leaves a model no more than a bag of words.

    Args:
        others: As in CaptionField.
    Shapes:
        InputRows of tokens (B, L), segments (B, L), places (T,): the first token of each caption
    """

    paired = False

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            captions = list(self.references_of(record))
            bags = [_disordered(caption, record.id, number) for number, caption in enumerate(captions)]
            return CaptionRow([self.ids(caption) for caption in [*captions, *bags]], captions)
        captions, (seed, epoch, _, *copy) = list(self.texts_of(record)), key
        return CaptionRow([self.ids(captions[hashed("caption", seed, epoch, record.id, *copy) % len(captions)])])

    def collate(self, values: Sequence[CaptionRow]) -> InputRows:  # type: ignore[override]
        rows = [value.texts for value in values]
        tokens, segments = pack(rows, self.tokenizer.pad_id)
        begins = [
            number * tokens.shape[1] + sum(map(len, row[:place]))
            for number, row in enumerate(rows)
            for place in range(len(row))
        ]
        counts, texts = [len(row) for row in rows], [value.references for value in values]
        return InputRows(tokens, segments, None, torch.tensor(begins, dtype=torch.long), counts, texts)

    def length(self, record: Record) -> int:
        """The mean length of its captions, one of which is read."""
        captions = self.texts_of(record)
        return round(sum(len(self.ids(caption)) for caption in captions) / len(captions))


def _disordered(caption: str, id: str, number: int) -> str:
    """A caption with its words in another order."""
    words = caption.split()
    order = numpy_rng("disordered", id, number).permutation(len(words))
    return " ".join(words[place] for place in order)
