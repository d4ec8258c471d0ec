"""The base of tasks whose models read rows of texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from vlm.data.batch import Batch
from vlm.evaluation.report.sections import random_places
from vlm.models.flop import Work
from vlm.tasks.shared.show import row_lines, text_shape
from vlm.training.step.task import Task


class TextTask(Task):
    """Base of tasks whose models read rows of texts.

    Attributes:
        read: Name of the field of the texts in batches.
    """

    read: ClassVar[str] = "texts"
    unit = "texts"

    @property
    def field(self) -> Any:
        """The field of the texts."""
        return self.fields[self.read]

    def work(self, batch: Batch) -> Work:
        return Work(0, *batch[self.read].tokens.shape)

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows = batch[self.read]
        lines = [f"batch       {text_shape(rows.tokens, rows.segments)}", f"sample      {batch.ids[0]}"]
        return [*lines, *row_lines(rows, self.field.tokenizer, shown=tokens)]

    def show(self, rows: Sequence[Mapping[str, Any]], line: Callable[[Any], str]) -> None:
        """Keeps random rows of an evaluation as its samples, each with a line to print."""
        self.evaluation.samples = [{**rows[at], "line": line(rows[at])} for at in random_places(len(rows))]
