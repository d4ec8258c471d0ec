"""The field of a text that is to be written of a text, such as its translation."""

from collections.abc import Sequence

from vlm.data.fields import CaptionField
from vlm.data.records import Record


class TargetField(CaptionField):
    """The translation of a record as a row of tokens; in evaluation beside its reference, which is the same."""

    needs = ("translation",)
    paired = False

    def texts_of(self, record: Record) -> Sequence[str]:
        return [record["translation"]]

    references_of = texts_of
