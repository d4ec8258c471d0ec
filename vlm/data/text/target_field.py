"""The field of a text to generate from another text, for example a translation."""

from collections.abc import Sequence

from vlm.data.fields import CaptionField
from vlm.data.records import Record


class TargetField(CaptionField):
    """The translation of a record as a row of tokens; in evaluation also as its reference."""

    needs = ("translation",)
    paired = False

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record["translation"]]

    references_of = texts_of
