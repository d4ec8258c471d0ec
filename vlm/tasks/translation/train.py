"""Translation and other text-to-text tasks: the model reads a text and generates another."""

import shlex
from pathlib import Path
from typing import Any, NotRequired, Unpack

import torch
from torch import Tensor

from vlm.data.batch import Batch
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.sections import MAX_SAMPLES, Note, Pictures, Section, Table, pick_samples
from vlm.inference.attention.pictures import Alignment, draw_alignment, read_alignment
from vlm.models.encoder_decoder import TextToText
from vlm.models.flop import Work
from vlm.tasks.shared.show import caption_line, first_row, text_shape
from vlm.tasks.shared.text_tasks import TextSearch
from vlm.tasks.translation.metrics import TranslatedText, TranslationMetric
from vlm.tasks.translation.predict import encode_texts
from vlm.training.data_module import Data
from vlm.training.step.losses import Term, row_losses, token_loss
from vlm.training.step.task import Task, TaskOptions

LOOKED_AT = 3  # translations in the report that have pictures of the model's attention


class TranslationOptions(TaskOptions):
    """Arguments of Translation other than its model, for subclasses to pass on."""

    max_tokens: Count
    beam: NotRequired[Count]
    length_penalty: NotRequired[float]
    val_texts: NotRequired[Count | None]


class Translation(Task):
    """Trains by next-token prediction; validates on generated translations.

    Args:
        model, options: As in Task; the model is a TextToText.
        fields: text, and translation.
        max_tokens: Most tokens of a decoded translation.
        beam, length_penalty: The search of a test, and of the commands by default; validations are greedy.
        val_texts: Texts that a validation translates; None for all.
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
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
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
        hidden = self.model(texts.tokens, rows.tokens, *places, **self.extra_inputs(batch))
        smoothing = self.label_smoothing
        return {"tokens": Term(*token_loss(hidden, rows.targets, self.model.head_parts, label_smoothing=smoothing))}

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

    def details(self) -> dict[str, Any]:
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

    def description(self) -> dict[str, Any]:
        return {**super().description(), **self.search.description()}
