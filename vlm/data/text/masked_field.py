"""The field of texts with masked tokens."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch

from vlm.data.batch import MaskedRows
from vlm.data.fields import AugmentKey
from vlm.data.records import Record
from vlm.data.text.input_fields import EncodedField
from vlm.data.text.inputs import Encoded, Input, input_rows
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Range, Share, UserError
from vlm.randomness import numpy_rng

MASKED, RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest is unchanged (Devlin et al. 2019, section 3.1)


class Masked(NamedTuple):
    """The rows of a sample with the indices of chosen tokens; the original tokens; and the indices of masked words."""

    rows: Sequence[Input]
    labels: Sequence[int]
    texts: Sequence[str] = ()
    gaps: Sequence[int] = ()


class MaskedField(EncodedField):
    """A text with a share of its tokens or words masked (Devlin et al. 2019).

    In training they are drawn by (seed, epoch, index), as is the part of a text that is longer than a row. In
    evaluation they are drawn by the sample's id and all masked, and a long text is split into rows.

    Args:
        tokenizer: See EncodedField; needs a mask id.
        max_len: See EncodedField.
        share: Share of tokens or words to choose; at least one is chosen.
        whole_words: Whether to choose whole words (separated by white space) instead of tokens.
    """

    needs = ("text",)

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        max_len: Annotated[int, Range(3)],
        share: Share = 0.15,
        whole_words: bool = False,
    ) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        self.share, self.whole_words = share, whole_words

    def prepare(self) -> None:
        self._learn_words()

    def restore(self, about: Mapping[str, Any]) -> None:
        super().restore(about)
        self._learn_words()

    def _learn_words(self) -> None:
        """Finds tokens that begin or end with white space, or consist of it.

        Raises:
            UserError: The tokenizer has no mask id.
        """
        if (mask_id := self.tokenizer.mask_id) is None:
            raise UserError("tokenizer.mask: is false, but this task needs a mask token; set it to true")
        self._mask_id = mask_id
        texts = [self.tokenizer.decode([id]) for id in range(self.tokenizer.vocab_size)]
        self._begins = np.array([text[:1].isspace() for text in texts])
        self._ends = np.array([text[-1:].isspace() for text in texts])
        self._blank = np.array([text.isspace() for text in texts])
        self._usual = np.array([id for id, text in enumerate(texts) if text])  # without special ids

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record["text"]]

    def encode(self, record: Record, key: AugmentKey | None) -> Masked:
        ids, room = np.array(self.tokenizer.encode(record["text"]), dtype=np.int64), self.max_len - 2
        rng = numpy_rng("mask", *((record.id,) if key is None else key))
        if key is not None and len(ids) > room:
            start = rng.integers(len(ids) - room + 1)
            ids = ids[start : start + room]
        words = self._word_numbers(ids)
        units = words if self.whole_words else np.arange(len(ids))
        count = int(units[-1]) + 1 if len(units) else 0
        gaps = np.sort(rng.permutation(count)[: max(1, round(self.share * count))])
        chosen = np.flatnonzero(np.isin(units, gaps))
        seen = ids.copy()
        seen[chosen] = self._mask_id if key is None else self._hidden(ids[chosen], rng)
        rows = [self._row(seen, chosen, start, room) for start in range(0, max(1, len(ids)), room)]
        if key is not None:
            return Masked(rows, ids[chosen].tolist())
        return Masked(rows, ids[chosen].tolist(), [record["text"]], sorted({*words[chosen].tolist()}))

    def _word_numbers(self, ids: np.ndarray) -> np.ndarray:
        """Index of each token's word; a word begins with the white space before it."""
        starts = np.zeros(len(ids), dtype=bool)
        starts[1:] = (self._begins[ids[1:]] | self._ends[ids[:-1]]) & ~self._blank[ids[:-1]]
        return np.cumsum(starts)

    def _hidden(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Training inputs for the chosen tokens: mostly masks, else random or unchanged tokens."""
        which, other = rng.random(len(ids)), self._usual[rng.integers(len(self._usual), size=len(ids))]
        rest = np.where(which < MASKED + RANDOM, other, ids)
        return np.where(which < MASKED, self._mask_id, rest)

    def _row(self, ids: np.ndarray, chosen: np.ndarray, start: int, room: int) -> Input:
        part = ids[start : start + room].tolist()
        places = [int(at) - start + 1 for at in chosen if start <= at < start + room]
        return Input([self.tokenizer.bos_id, *part, self.tokenizer.eos_id], [0] * (len(part) + 2), places)

    def collate(self, values: Sequence[Masked]) -> MaskedRows:  # type: ignore[override]
        rows = input_rows([Encoded(value.rows, value.texts) for value in values], self.tokenizer.pad_id)
        labels = torch.tensor([id for value in values for id in value.labels], dtype=torch.long)
        return MaskedRows(**vars(rows), labels=labels, gaps=[value.gaps for value in values])
