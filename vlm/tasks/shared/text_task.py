"""The base of tasks whose models read rows of texts, and the decoding of texts in their evaluations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from vlm.data.batch import Batch
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.options import Decoding
from vlm.evaluation.report.sections import sample_indices
from vlm.inference.options import DecodingOptions
from vlm.inference.writing import Text, decode_likeliest
from vlm.models.context import Context
from vlm.models.encoder_decoder import EncoderDecoder
from vlm.models.flop import Work
from vlm.nn.step.replay import StepperPool
from vlm.tasks.shared.show import row_lines, text_shape
from vlm.training.step.task import Task


class TextWritingTask(Protocol):
    """A task whose model writes texts."""

    @property
    def model(self) -> EncoderDecoder: ...

    @property
    def tokenizer(self) -> Tokenizer: ...


class TextSearch:
    """Decodes texts from encoded inputs with a task's model: by beam search in a test, greedily in a validation.

    Args:
        max_tokens: Longest text, in tokens.
        beam: Hypotheses of each search of a test; 1 is greedy.
        length_penalty: They are ranked by log-probability / length ** length_penalty.
    """

    def __init__(self, task: TextWritingTask, *, max_tokens: int, beam: int, length_penalty: float) -> None:
        self.task, self.greedy = task, Decoding(max_tokens=max_tokens)
        self.search = Decoding(max_tokens=max_tokens, beam=beam, length_penalty=length_penalty)

    def use_stored_options(self, stored: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Uses the decoding options of a Hugging Face folder, as the commands do.

        Args:
            stored: The options in the checkpoint.
            config: The task's config, whose options take precedence.
        """
        task_options = {name: config[name] for name in ("beam", "length_penalty", "max_tokens")}
        chosen = DecodingOptions().resolve({**stored, **task_options})
        self.search = chosen.build_decoding(chosen.build_rules(self.task.tokenizer), sample=False)

    def begin(self) -> None:
        self.pool = StepperPool()  # a GPU records a decode step once for all batches

    def end(self) -> None:
        del self.pool  # frees its memory

    def texts(self, context: Context, *, final: bool, language: str | None = None) -> list[Text]:
        task, decoding = self.task, self.search if final else self.greedy
        return decode_likeliest(task.model, task.tokenizer, context, decoding, pool=self.pool, language=language)

    def description(self) -> dict[str, Any]:
        """Returns options that a checkpoint stores for the commands."""
        stored = {name: getattr(self.search, name) for name in ("beam", "length_penalty")}
        return {"max_tokens": self.search.max_tokens, "decoding": stored}


class TextTask(Task):
    """Base of tasks whose models read rows of texts.

    Attributes:
        text_field: Name of the field of the texts in batches.
    """

    text_field: ClassVar[str] = "texts"
    unit = "texts"

    @property
    def field(self) -> Any:
        """The field of the texts."""
        return self.fields[self.text_field]

    def work(self, batch: Batch) -> Work:
        return Work(0, *batch[self.text_field].tokens.shape)

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows = batch[self.text_field]
        lines = [f"batch       {text_shape(rows.tokens, rows.segments)}", f"sample      {batch.ids[0]}"]
        return [*lines, *row_lines(rows, self.field.tokenizer, limit=tokens)]

    def show(self, rows: Sequence[Mapping[str, Any]], line: Callable[[Any], str]) -> None:
        """Keeps random rows of an evaluation as its samples, each with a line to print."""
        self.evaluation.samples = [{**rows[at], "line": line(rows[at])} for at in sample_indices(len(rows))]
