"""Translation and other text-to-text tasks: the model reads a text and generates another. Its metrics and report."""

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, NotRequired, Unpack

import numpy as np
import torch
from torch import Tensor

from vlm.data.batch import Batch
from vlm.data.records import Split
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count, Range
from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer
from vlm.evaluation.metrics.records import SampleMetric
from vlm.evaluation.metrics.texts import NAMES, TextScores
from vlm.evaluation.report.content import MAX_SAMPLES, Note, Pictures, Section, Table, pick_samples
from vlm.inference.attention.pictures import Alignment, draw_alignment, read_alignment
from vlm.models.encoder_decoder import TextToText
from vlm.models.flop import Work
from vlm.tasks.shared.show import caption_line, first_row, text_shape
from vlm.tasks.shared.text_tasks import TextSearch
from vlm.tasks.translation.predict import encode_texts
from vlm.training.data_module import Data
from vlm.training.step.losses import Term, check_dropout, consistent_terms, row_losses, token_loss
from vlm.training.step.task import Task, TaskOptions
from vlm.untrusted.sizes import JsonValue

ROUNDS = 5
PAIRS = 20_000  # training pairs that the dictionary, a control, is learned from
LOOKED_AT = 3  # translations in the report that have pictures of the model's attention


class Dictionary:
    """Translates each word separately by its most probable translation (Brown et al. 1993, model 1).

    Model 1 aligns each word of a translation with one word of its text, or with none, at any position. Its table of
    probabilities is fitted by expectation maximisation. Unknown words are copied.

    Args:
        pairs: Texts with their translations; words are separated by spaces.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        rows = [(words(text), words(translation)) for text, translation in pairs]
        sources = _vocabulary(text for text, _ in rows)
        targets = _vocabulary(translation for _, translation in rows)
        numbers = []
        for text, translation in rows:
            numbers.append(([0, *(sources[word] for word in text)], [targets[word] for word in translation]))
        best, names = _likeliest(numbers, len(targets)), list(targets)
        self._translations = {word: names[best[number]] for word, number in sources.items() if number in best}

    def translate(self, text: str) -> str:
        """Returns the translations of a text's words, in the order of the text."""
        return " ".join(self._translations.get(word, word) for word in words(text))


def words(text: str) -> list[str]:
    """Returns the words between spaces; a no-break space does not separate words."""
    return [word for word in text.split(" ") if word]


def _vocabulary(texts: Iterable[Sequence[str]]) -> dict[str, int]:
    """Numbers words from 1; 0 stands for no word."""
    words = dict.fromkeys(word for text in texts for word in text)
    return {word: number for number, word in enumerate(words, start=1)}


def _likeliest(rows: Sequence[tuple[Sequence[int], Sequence[int]]], size: int) -> dict[int, int]:
    """Returns the likeliest translation of each word as an index, from numbered texts and translations.

    Args:
        size: Number of distinct words in translations.
    """
    # Links of each translation's words to its text's, source * size + target, and the places of the former.
    link_parts, place_parts, at = [np.empty(0, np.int64)], [np.empty(0, np.int64)], 0
    for text, translation in rows:
        link_parts.append((np.array(text)[:, None] * size + np.array(translation, np.int64) - 1).ravel())
        place_parts.append(np.tile(np.arange(at, at + len(translation)), len(text)))
        at += len(translation)
    links, places = np.concatenate(link_parts), np.concatenate(place_parts)
    codes, link = np.unique(links, return_inverse=True)
    source, target = np.divmod(codes, size)
    table = np.ones(len(codes))  # P(target | source), up to a factor
    for _ in range(ROUNDS):
        weights = table[link]
        weights /= np.bincount(places, weights)[places]
        counts = np.bincount(link, weights, len(codes))
        table = counts / np.bincount(source, counts)[source]
    order = np.lexsort((table, source))
    return dict(zip(source[order].tolist(), target[order].tolist(), strict=True))  # the last entry of a word wins


class TranslatedText(NamedTuple):
    """A text of an evaluation with its translation by the model, and the model's loss on the reference."""

    text: str
    translation: str
    reference: str
    loss: float


class TranslationMetric(SampleMetric[TranslatedText]):
    """Scores of all translations of all processes.

    Attributes:
        scores: Scores of the last `compute`.
        controls: Scores of controls on the same texts.
    """

    kind, unit = TranslatedText, "text"
    scores: TextScores
    controls: dict[str, TextScores]

    def compute(self) -> dict[str, float]:
        """Returns the scores, and ``length_ratio``, the number of words of translations over that of references."""
        _, translations, references, _ = zip(*self.gather(), strict=True)
        self.scores, self.controls = TextScores(translations, references), {}
        lengths = [sum(len(words(text)) for text in texts) for texts in (translations, references)]
        return self.scores.summary | {"length_ratio": lengths[0] / max(1, lengths[1])}

    def dictionary(self, train: Split) -> dict[str, float]:
        """Returns metric@dictionary: the scores of a word-for-word dictionary learned from the training split."""
        dictionary = Dictionary((record["text"], record["translation"]) for record in train.records(PAIRS))
        translations = [dictionary.translate(sample.text) for sample in self.samples.values()]
        self.controls["dictionary"] = TextScores(translations, self.scores.references)
        return {f"{name}@dictionary": value for name, value in self.controls["dictionary"].summary.items()}

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of a metric of the model and of a control in `controls`, and the number of texts."""
        place = NAMES.index(metric)
        model, baseline = (column_scorer(scores.score, place) for scores in (self.scores, self.controls[control]))
        return model, baseline, len(self.samples)


class TranslationOptions(TaskOptions):
    """Arguments of Translation other than its model, for subclasses to pass on."""

    max_tokens: Count
    beam: NotRequired[Count]
    length_penalty: NotRequired[float]
    val_texts: NotRequired[Count | None]
    consistency: NotRequired[float]


class Translation(Task):
    """Trains by next-token prediction; validates on generated translations.

    Args:
        model, options: As in Task; the model is a TextToText.
        fields: text, and translation.
        max_tokens: Most tokens of a decoded translation.
        beam, length_penalty: The search of a test, and of the commands by default; validations are greedy.
        val_texts: Texts that a validation translates; None for all.
        consistency: Factor of the divergence of two passes with other dropout (R-Drop, Liang et al. 2021); 0 for none.
    """

    name = "translation"
    headlines = ("bleu", "chrf", "exact_match")
    curves = ("bleu", "chrf", "exact_match", "length_ratio")
    unit = "texts"
    model: TextToText

    def __init__(
        self,
        *,
        model: TextToText,
        max_tokens: Count,
        beam: Count = 1,
        length_penalty: float = 1.0,
        val_texts: Count | None = None,
        consistency: Annotated[float, Range(0)] = 0.0,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.consistency = consistency
        if consistency:
            check_dropout(model)
        self.search = TextSearch(self, max_tokens=max_tokens, beam=beam, length_penalty=length_penalty)
        self.val_texts, self.metric = val_texts, TranslationMetric()
        self._alignments: list[Alignment] = []  # for the first texts of a test

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of both languages."""
        return self.fields["translation"].tokenizer  # type: ignore[return-value]

    def work(self, batch: Batch) -> Work:
        (rows, length), texts = batch["translation"].tokens.shape, batch["text"]
        read = (texts.tokens if texts.layout is None else texts.layout).shape[1]
        return Work(rows=rows, length=length, read=read, packed=tuple(texts.tokens.shape))

    def loss(self, batch: Batch) -> dict[str, Term]:
        texts, rows = batch["text"], batch["translation"]
        places = (rows.segments, texts.segments, texts.types, texts.layout)
        inputs, head, smoothing = self.extra_inputs(batch), self.model.head_parts, self.label_smoothing
        hidden = self.model(texts.tokens, rows.tokens, *places, **inputs)
        if not self.consistency:
            return {"tokens": Term(*token_loss(hidden, rows.targets, head, label_smoothing=smoothing))}
        passes = (hidden, self.model(texts.tokens, rows.tokens, *places, **inputs))
        return consistent_terms(passes, rows.targets, head, weight=self.consistency, label_smoothing=smoothing)

    def counts(self, batch: Batch) -> dict[str, int] | None:
        count = batch["translation"].targets.count
        return {"tokens": count, "consistency": count} if self.consistency else None

    def extra_inputs(self, batch: Batch) -> dict[str, Tensor]:
        """Returns further inputs of the encoder for a batch."""
        return {}

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.search.begin()
        self._alignments = []

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds a batch's loss and, up to `val_texts`, the model's translations, from one encoding."""
        texts, rows, model = batch["text"], batch["translation"], self.model
        context = encode_texts(model, texts, **self.extra_inputs(batch))
        with torch.autocast(self.device.type, enabled=False):
            hidden = model.decoder(rows.tokens, rows.segments, context)
            sums, counts = row_losses(hidden, rows.targets, model.head_parts)
        self.evaluation.add_loss({"tokens": Term(sums.sum(), counts.sum())})
        if not final and self.evaluation.has_samples(self.val_texts):
            return
        hypotheses = self.search.texts(context, final=final)
        if final and not self._alignments and not self.extra_inputs(batch):
            examples = zip(range(LOOKED_AT), texts.ids(), hypotheses, strict=False)
            rows_of = ((context.rows(slice(at, at + 1)), ids, hypothesis.tokens) for at, ids, hypothesis in examples)
            alignments = (read_alignment(model.decoder, self.tokenizer, *row) for row in rows_of)
            self._alignments = [hypothesis for hypothesis in alignments if hypothesis is not None]
        read, translations = map(self.tokenizer.decode, texts.ids()), [hypothesis.text for hypothesis in hypotheses]
        references, losses = [reference for (reference,) in rows.references], (sums / counts.clamp(min=1)).tolist()
        samples = list(map(TranslatedText, read, translations, references, losses))
        self.metric.update(batch.ids, samples)
        for id, sample in zip(batch.ids, samples, strict=True):
            line = caption_line(sample.translation, [sample.reference])
            self.evaluation.samples.append({"id": id, **sample._asdict(), "line": line})

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        self.search.end()
        results = self.metric.compute()
        if final:
            results |= self.metric.dictionary(self.data.split("train")) | self.metric.scores.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.metric.scorers(metric, control)

    def details(self) -> dict[str, JsonValue]:
        texts = {id: sample._asdict() for id, sample in self.metric.samples.items()}
        return {"signatures": self.metric.scores.signatures(), "texts": texts}

    def predictions(self) -> list[dict[str, str]]:
        return [{"id": id, "translation": sample.translation} for id, sample in self.metric.samples.items()]

    def report(self) -> list[Section]:
        """Random translations, those with the highest loss, pictures of attention, and notes on the metrics."""
        samples, sections = list(self.metric.samples.values()), []
        worst = sorted(samples, key=lambda sample: -sample.loss)[:MAX_SAMPLES]
        for title, chosen in {"Random translations": pick_samples(samples), "Highest loss": worst}.items():
            table = Table(TranslatedText._fields, [[*texts, f"{loss:.2f}"] for *texts, loss in chosen])
            sections.append(Section(title, [table]))
        if self._alignments:
            note = (
                "Dark cells have high attention weights in the last layer (mean over heads) for the word on the left."
            )
            pictures = [(" ".join(alignment.translation), draw_alignment(alignment)) for alignment in self._alignments]
            sections.append(Section("Attention", [Note(note), Pictures(pictures)]))
        signatures = [Note(f"{name}: {signature}") for name, signature in self.metric.scores.signatures().items()]
        return [*sections, Section("Metrics", signatures)]

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        texts, rows = batch["text"], batch["translation"]
        lines = [f"batch       {text_shape(field.tokens, field.segments)}" for field in (texts, rows)]
        lines += [f"sample      {batch.ids[0]}", f"  text      {self.tokenizer.decode(texts.ids()[0])}"]
        return lines + first_row(rows.tokens, rows.segments, self.tokenizer, name="written", limit=tokens)

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm translate --text {shlex.quote(data.split(data.final_split).record(0)['text'])}"

    def description(self) -> dict[str, JsonValue]:
        return {**super().description(), **self.search.description()}
