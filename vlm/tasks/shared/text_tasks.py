"""The bases of tasks that read or write text, the test whether a task with images uses them, and simple baselines."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Unpack

import torch
from torch import Tensor

from vlm.checkpoint.stored import DecodingDefaults
from vlm.data.batch import Batch, PromptRows, TextRows
from vlm.data.records import find_block
from vlm.data.text.prompt_field import PromptField
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.options import Decoding
from vlm.errors import Count
from vlm.evaluation.report.content import pick_samples
from vlm.inference.options import DecodingOptions
from vlm.inference.writing import Text, decode_likeliest
from vlm.models.context import Context, Features, interleave_states
from vlm.models.encoder_decoder import EncoderDecoder, VisionLanguageModel
from vlm.models.flop import Work
from vlm.nn.device import widest_float
from vlm.nn.step.replay import StepperPool
from vlm.tasks.shared.show import first_row, image_shape, row_lines, text_shape
from vlm.tasks.tagging.metrics import TaggingMetric
from vlm.training.image_cache import as_read
from vlm.training.step.losses import Term, row_losses, token_loss
from vlm.training.step.task import Task, TaskOptions
from vlm.untrusted.sizes import JsonValue

Losses = tuple[Tensor, Tensor]  # sums and counts of rows, each (B,)
Words = Sequence[str]
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


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
        ends: Tokens that end a text, besides the tokenizer's end token.
    """

    def __init__(
        self,
        task: TextWritingTask,
        *,
        max_tokens: int,
        beam: int = 1,
        length_penalty: float = 1.0,
        ends: Sequence[int] = (),
    ) -> None:
        self.task, self.greedy = task, Decoding(max_tokens=max_tokens, ends=tuple(ends))
        self.search = replace(self.greedy, beam=beam, length_penalty=length_penalty)

    def use_stored_options(self, stored: DecodingDefaults, config: Mapping[str, Any]) -> None:
        """Uses the decoding options of a Hugging Face folder, as the commands do.

        Args:
            stored: The options in the checkpoint.
            config: The task's config, whose options take precedence.
        """
        task_options: DecodingDefaults = {"max_tokens": config["max_tokens"]}
        task_options |= {name: config[name] for name in ("beam", "length_penalty") if name in config}  # type: ignore
        chosen = DecodingOptions().resolve({**stored, **task_options})
        self.search = chosen.build_decoding(chosen.build_rules(self.task.tokenizer), sample=False)

    def begin(self) -> None:
        self.pool = StepperPool()  # a GPU records a decode step once for all batches

    def end(self) -> None:
        del self.pool  # frees its memory

    def texts(self, context: Context, *, final: bool, language: str | None = None) -> list[Text]:
        task, decoding = self.task, self.search if final else self.greedy
        return decode_likeliest(task.model, task.tokenizer, context, decoding, pool=self.pool, language=language)

    def description(self) -> dict[str, JsonValue]:
        """Returns options that a checkpoint stores for the commands."""
        stored = {name: getattr(self.search, name) for name in ("beam", "length_penalty")}
        stored |= {"ends": list(self.search.ends)} if self.search.ends else {}
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
        self.evaluation.samples = [{**row, "line": line(row)} for row in pick_samples(rows)]


class GroundingLosses:
    """Losses of an evaluation's samples, with controls.

    The decoder reads each image with another sample's captions, and each sample's captions with a blank image. Both
    leave the loss of a model that ignores images unchanged, and raise that of a model that uses them. Samples without
    an image have no controls. Partners depend only on the places of samples in the split, so that neither batches nor
    processes change the results.

    Args:
        size: Number of samples of the split.
        device: Where losses are summed.
    """

    CONTROLS = ("shuffled", "blank")

    def __init__(self, size: int, device: torch.device) -> None:
        self._sums = torch.zeros(1 + len(self.CONTROLS), size, 2, dtype=widest_float(device), device=device)

    def read(
        self,
        losses: Callable[[TextRows, Context], Losses],
        rows: TextRows,
        context: Context,
        *,
        blank: Context | None,
    ) -> Losses:
        """Returns the losses of a batch's rows; adds them and the controls if `blank` is given.

        Args:
            losses: Computes the losses of captions with images.
            rows: The captions, with those of the samples' partners.
            context: The batch's images, encoded.
            blank: One blank image, encoded.
        """
        caption_losses, partner_rows = losses(rows, context), rows.partners
        if blank is None:
            return caption_losses
        self._put(0, rows.indices, caption_losses)
        # A lone sample is its own partner, and partners with another number of images have no texts.
        if partner_rows is not None and partner_rows.indices != rows.indices and partner_rows.tokens.numel():
            self._put(1, partner_rows.indices, losses(partner_rows, context), partner_rows.has_image)
        blank_index = torch.zeros(len(rows.indices), dtype=torch.long, device=blank.states.device)
        self._put(2, rows.indices, losses(rows, blank.rows(blank_index)), rows.has_image)
        return caption_losses

    def _put(self, kind: int, places: list[int], losses: Losses, counted: Tensor | None = None) -> None:
        """Stores the losses of some samples, of all or of those that count."""
        index = torch.tensor(places, device=self._sums.device)
        pairs = torch.stack(losses, dim=1).to(self._sums.dtype)
        self._sums[kind, index] = pairs if counted is None else pairs.masked_fill(~counted[:, None], 0)

    def results(self, loss: float, summed: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Returns loss@shuffled and loss@blank: the split's loss plus a control's increase, on samples that have both.

        Args:
            loss: Loss of the whole split.
            summed: Sums a tensor over the processes.
        """
        model_sums, *controls = summed(self._sums).cpu()
        losses = {}
        for name, control_sums in zip(self.CONTROLS, controls, strict=True):
            has_both = (model_sums[:, 1] > 0) & (control_sums[:, 1] > 0)
            if has_both.any():
                added = (control_sums[has_both, 0] - model_sums[has_both, 0]).sum() / model_sums[has_both, 1].sum()
                losses[f"loss@{name}"] = loss + added.item()
        return losses


class ImageTextTask(Task):
    """Trains by next-token prediction of text given an image.

    Attributes:
        text_field: Name of the field of text, such as "captions".
        segment_name: Name of one of its segments to print, such as "caption".
    Args:
        model, options: As in Task; the model is a VisionLanguageModel, fields are images, and the field of text.
        max_tokens: Most tokens of a decoded text.
    """

    text_field: ClassVar[str]
    segment_name: ClassVar[str]
    model: VisionLanguageModel

    def __init__(self, *, model: VisionLanguageModel, max_tokens: Count, **options: Unpack[TaskOptions]) -> None:
        super().__init__(model=model, **options)
        self.max_tokens = max_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""
        return self.fields[self.text_field].tokenizer  # type: ignore[return-value]

    def work(self, batch: Batch) -> Work:
        images, (rows, length) = batch["images"], batch[self.text_field].tokens.shape
        return Work(len(images), rows, length, cached=isinstance(images, Features))

    def loss(self, batch: Batch) -> dict[str, Term]:
        hidden = self.hidden(self.model, batch, as_read(batch["images"], self.preprocess))
        return {"tokens": self.token_term(batch, hidden)}

    def hidden(self, model: VisionLanguageModel, batch: Batch, images: Tensor | Features | None) -> Tensor:
        """Returns a model's hidden states of the texts of a training batch, given its images as model input."""
        rows = batch[self.text_field]
        return model(images, rows.tokens, rows.segments, rows.image_states, rows.scored)

    def token_term(self, batch: Batch, hidden: Tensor) -> Term:
        """Returns the loss of the texts of a training batch."""
        targets, smoothing = batch[self.text_field].targets, self.label_smoothing
        return Term(*token_loss(hidden, targets, self.model.head_parts, label_smoothing=smoothing))

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        size = len(self.data.split(self.evaluation.split))
        self.grounding = GroundingLosses(size, self.device)
        self.controlled = range(size) if self.trainer.testing else find_block(0, size)

    def add_losses(self, batch: Batch, context: Context) -> list[float]:
        """Adds a batch's loss to that of the split, with controls for `controlled` samples; returns each image's loss.

        Args:
            context: The batch's images, encoded.
        """
        rows = batch[self.text_field]
        blank = self.blank(batch["images"]) if any(index in self.controlled for index in rows.indices) else None

        def losses(rows: TextRows, context: Context) -> Losses:
            return row_losses(self.read_rows(self.model, rows, context), rows.targets, self.model.head_parts)

        sums, counts = self.grounding.read(losses, rows, context, blank=blank)
        self.evaluation.add_loss({"tokens": Term(sums.sum(), counts.sum())})
        return (sums / counts.clamp(min=1)).tolist()

    @staticmethod
    def read_rows(model: VisionLanguageModel, rows: TextRows, context: Context) -> Tensor:
        """Returns a model's hidden states of texts, given the encoded images of their batch: (B, L, D)."""
        if rows.image_states is None:
            return model.decoder(rows.tokens, rows.segments, context)
        index = rows.image_states % max(1, context.states.shape[:2].numel())  # a blank image has the states of one
        return model.read_prompts(context.states, rows.tokens, rows.segments, index, rows.scored)

    def blank(self, pixels: Tensor, model: VisionLanguageModel | None = None) -> Context:
        """Encodes an image of the mean colour, which is 0 after normalisation.

        Args:
            model: The model that encodes it; None for the task's.
        """
        model = model or self.model
        with torch.autocast(pixels.device.type, enabled=False):
            return model.encode(torch.zeros(1, *pixels.shape[1:], device=pixels.device))

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows = batch[self.text_field]
        shapes = f"{image_shape(batch['images'])}, {text_shape(rows.tokens, rows.segments)}"
        lines = [f"batch       {shapes}", f"sample      {batch.ids[0]}"]
        row, name = (rows.tokens, rows.segments, self.tokenizer), self.segment_name
        return lines + first_row(*row, name=name, limit=tokens, scored=rows.scored)

    @property
    def ends(self) -> Sequence[int]:
        """Tokens that end a text, besides the tokenizer's end token."""
        field = self.fields[self.text_field]
        return field.ends if isinstance(field, PromptField) else ()

    def description(self) -> dict[str, JsonValue]:
        return {**super().description(), "max_tokens": self.max_tokens}


MAX_PROMPTS = 32  # prompts that are decoded together, to bound memory


def prompt_contexts(rows: PromptRows, states: Tensor) -> Iterator[Context]:
    """Yields the prompts of a batch, in order and a few at a time, with the states of their images inside.

    Args:
        states: The batch's encoded images.
    Shapes:
        states (T, S, D) -> contexts of one row per prompt
    """
    by_row = states.flatten(0, 1).split(list(rows.num_states))
    prompts = [(row_states, prompt) for row_states, row in zip(by_row, rows.prompts, strict=True) for prompt in row]
    for start in range(0, len(prompts), MAX_PROMPTS):
        states_of_prompts, tokens = zip(*prompts[start : start + MAX_PROMPTS], strict=True)
        yield interleave_states(tokens, torch.cat(states_of_prompts))


class NaiveBayes:
    """Multinomial naive Bayes on bags of words, with add-one smoothing (McCallum and Nigam 1998).

    Args:
        samples: The words of each training sample, and its class.
        num_classes: Number of classes.
    """

    def __init__(self, samples: Iterable[tuple[Words, int]], num_classes: int) -> None:
        self.counts: list[Counter[str]] = [Counter() for _ in range(num_classes)]
        sizes = [0] * num_classes
        for words, label in samples:
            sizes[label] += 1
            self.counts[label].update(words)
        vocabulary_size = len(set().union(*self.counts)) + 1  # plus one for unseen words
        self.totals = [sum(counts.values()) + vocabulary_size for counts in self.counts]
        self.priors = [math.log(max(size, 1e-9) / max(1, sum(sizes))) for size in sizes]

    def predict(self, words: Words) -> int:
        """The likeliest class."""
        scores = [
            prior + sum(math.log((counts[word] + 1) / total) for word in words)
            for prior, counts, total in zip(self.priors, self.counts, self.totals, strict=True)
        ]
        return scores.index(max(scores))


def bag_of(texts: Sequence[str]) -> list[str]:
    """Returns the words of one or two texts, each marked with the number of its text."""
    return [f"{place} {word}" for place, text in enumerate(texts) for word in text.lower().split()]


class MostFrequent:
    """The most frequent value of each key in training, for controls that know only a key.

    Args:
        samples: Keys of each sample, from the most specific to the most general, and its value.
        of_equals: Choice among equally frequent values: min for the first by name, max for the last.
    """

    def __init__(
        self, samples: Iterable[tuple[Sequence[Hashable], str]], *, of_equals: Callable[[Iterable[str]], str] = min
    ) -> None:
        counts: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
        for keys, value in samples:
            for key in dict.fromkeys(keys):
                counts[key][value] += 1
        highest = {key: max(value_counts.values()) for key, value_counts in counts.items()}
        self._values = {
            key: of_equals(value for value, count in value_counts.items() if count == highest[key])
            for key, value_counts in counts.items()
        }

    def value(self, keys: Iterable[Hashable]) -> str:
        """Returns the value of the first key that training has; "" if it has none."""
        return next((self._values[key] for key in keys if key in self._values), "")


def beginnings(question: str) -> list[str]:
    """Returns a question, its first two words, its first word, and ""."""
    words = question.lower().split()
    return [" ".join(words), " ".join(words[:2]), " ".join(words[:1]), ""]


def tag_controls(metric: TaggingMetric, train: Iterable[tuple[Words, Words]]) -> dict[str, float]:
    """Returns metric@frequent, of each word's most frequent tag in train, and metric@constant, of the overall one."""
    pairs = (pair for sentence in train for pair in zip(*sentence, strict=True))
    frequent = MostFrequent(((word, None), tag) for word, tag in pairs)
    sentences = [sample.words for sample in metric.samples.values()]
    metric.controls = {
        "frequent": [[frequent.value((word, None)) for word in words] for words in sentences],
        "constant": [[frequent.value([None])] * len(words) for words in sentences],
    }
    scores = {control: metric.score(tags) for control, tags in metric.controls.items()}
    return {f"{name}@{control}": value for control, values in scores.items() for name, value in values.items()}


def overlapping_span(question: str, context: str) -> str:
    """Returns the longest run of words not in a question, from the context's sentence that shares most with it."""
    question_words = set(_WORD.findall(question.lower()))
    sentences = [part for part in _SENTENCE_END.split(context) if part.strip()]
    if not sentences:
        return ""
    sentence = max(sentences, key=lambda part: len(question_words & set(_WORD.findall(part.lower()))))
    runs: list[tuple[int, int]] = [(0, 0)]
    for match in _WORD.finditer(sentence):
        if match.group().lower() in question_words:
            runs.append((match.end(), match.end()))
        else:
            start, stop = runs[-1]
            runs[-1] = (match.start() if start == stop else start, match.end())
    start, stop = max(runs, key=lambda run: len(_WORD.findall(sentence[slice(*run)])))
    return sentence[start:stop]
