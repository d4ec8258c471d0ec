"""Language modelling: a decoder without context predicts text token by token."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from vlm.data.batch import Batch, Targets, TextRows
from vlm.data.text.text_field import TextField
from vlm.data.text.tokenizer import Tokenizer
from vlm.errors import Count, Range, Share, printable
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import SampleMetric
from vlm.evaluation.report.content import Section, Texts
from vlm.models.decoder import TextDecoder
from vlm.models.flop import Work
from vlm.tasks.language_modeling.predict import generate
from vlm.tasks.shared.distillation import DistilledTask, Teacher, TokenDistillation
from vlm.tasks.shared.show import first_row, text_shape
from vlm.training.data_module import Data
from vlm.training.step.losses import Term, row_losses, token_loss
from vlm.training.step.task import TaskOptions


class WindowLosses(NamedTuple):
    """A window of an evaluation.

    Args:
        tokens: Number of scored tokens.
        model: Their loss in nats, summed.
        unigram: Their loss by the frequencies of tokens in train, summed; None if these are not counted.
    """

    tokens: int
    model: float
    unigram: float | None


class WindowMetric(SampleMetric[WindowLosses]):
    """Losses per token over all windows of all processes; other methods refer to the windows of the last `compute`."""

    kind, unit = WindowLosses, "text"

    def compute(self) -> dict[str, float]:
        """Returns the loss per token as "model" and, if it was counted, as "unigram".

        Raises:
            UserError: Nothing was added.
        """
        self.gather()
        return {name: float(np.divide(*self._sums(name).sum(0))) for name in ("model", "unigram") if self._has(name)}

    def scorers(self, scale: float) -> tuple[Scorer, Scorer, int] | None:
        """Returns scorers of the losses per token of model and unigram, and the number of windows.

        Args:
            scale: Factor of the losses.
        """
        if not self._has("unigram"):
            return None
        model, unigram = (ratio_scorer(self._sums(name) * [scale, 1]) for name in ("model", "unigram"))
        return model, unigram, len(self.samples)

    def intervals(self, name: str, scale: float, *, seed: int) -> dict[str, float]:
        """Returns name@low and name@high of the model's loss per token times `scale`: a 95% interval by bootstrap."""
        return intervals([name], ratio_scorer(self._sums("model") * [scale, 1]), len(self.samples), seed=seed)

    def _has(self, name: str) -> bool:
        return all(getattr(window, name) is not None for window in self.samples.values())

    def _sums(self, name: str) -> Floats:
        """Returns the loss and the number of tokens of each window. Shapes: -> (N, 2)"""
        return np.array([[getattr(window, name), window.tokens] for window in self.samples.values()], np.float64)


def unigram_losses(tokens: Tensor, targets: Targets, logprobs: Floats) -> list[float]:
    """Returns the loss of token frequencies in nats, summed over the scored positions of each row.

    Args:
        logprobs: Log-probability of each token.
    Shapes:
        tokens (B, L), logprobs (V,) -> (B,)
    """
    losses = torch.zeros(math.prod(tokens.shape), dtype=torch.float64)
    places = slice(None) if targets.places is None else targets.places.cpu()
    losses[places] = -torch.from_numpy(logprobs)[targets.labels.cpu()]
    return losses.view(tokens.shape).sum(1).tolist()


MAX_COUNTED = 10_000_000  # tokens of a split that the control counts


class LanguageModeling(DistilledTask):
    """Trains and validates by next-token prediction.

    Args:
        model, options: As in Task; the model is a TextDecoder without context.
        fields: text.
        sampled_batches: Random batches for nanoGPT's estimate of the loss, in addition to that of the whole split; 0
            for none.
        prompts: Texts that each validation continues as samples; an empty one starts a document.
        prompt_tokens: Number of tokens of these continuations.
        z_loss: Factor of PaLM's auxiliary loss, which keeps logits from drifting; see `vocabulary_loss`.
        teacher: A model whose predictions the trained model learns; None for none.
    """

    name = "language_modeling"
    headlines = ("bits_per_byte", "perplexity")
    smaller_is_better = ("loss", *headlines)
    curves = ("bits_per_byte",)
    unit = "tokens"
    model: TextDecoder

    def __init__(
        self,
        *,
        model: TextDecoder,
        sampled_batches: Annotated[int, Range(0)] = 0,
        prompts: Sequence[str] = ("",),
        prompt_tokens: Count = 64,
        z_loss: Share = 0.0,
        teacher: Teacher | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, **options)
        self.sampled_batches = sampled_batches
        self.prompts, self.prompt_tokens, self.z_loss = prompts, prompt_tokens, z_loss
        self.windows = WindowMetric()
        if teacher is not None and teacher.path is not None:
            self.distillation = TokenDistillation(
                self, TextDecoder, teacher, lambda model, batch, images: self.hidden(model, batch["text"]), "text"
            )

    def _read_teacher(self, model: TextDecoder, batch: Batch, images: None) -> Tensor:
        return self.hidden(model, batch["text"])

    @property
    def text(self) -> TextField:
        """The field of the text."""
        return self.fields["text"]  # type: ignore[return-value]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""
        return self.text.tokenizer

    def size(self, batch: Batch) -> int:
        return batch["text"].tokens[:, 1:].numel()

    def work(self, batch: Batch) -> Work:
        return Work(0, *batch["text"].tokens[:, 1:].shape)

    def token_loss(self, rows: TextRows, **options: float) -> tuple[Tensor, int]:
        """Returns the summed cross-entropy in nats and the number of predicted tokens; see `losses.token_loss`."""
        return token_loss(self.hidden(self.model, rows), rows.targets, self.model.head_parts, **options)

    @staticmethod
    def hidden(model: TextDecoder, rows: TextRows) -> Tensor:
        """Returns the states from which a model predicts the targets: (B, L, D)."""
        segments = None if rows.segments is None else rows.segments[:, :-1]
        return model(rows.tokens[:, :-1], segments, bounds=rows.bounds)

    def loss(self, batch: Batch) -> dict[str, Term]:
        rows, options = batch["text"], {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        hidden = self.hidden(self.model, rows)
        terms = {"tokens": Term(*token_loss(hidden, rows.targets, self.model.head_parts, **options))}
        return terms if self.distillation is None else self.distillation.terms(batch, terms, hidden)

    def counts(self, batch: Batch) -> dict[str, int] | None:
        return self.distilled_counts(batch, "tokens", batch["text"].targets.count)

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        # A foreign model's text is not encoded yet, and that of train may be long.
        counted = self.trainer.testing and self.trained.steps is not None and "train" in self.data.splits
        self._unigram: Floats | None = None  # log-probability of each token by its frequency in train, plus one: (V,)
        if counted:
            tokens = self.text.tokens("train").tokens[:MAX_COUNTED]
            counts = np.bincount(tokens, minlength=self.tokenizer.vocab_size) + 1
            self._unigram = np.log(counts / counts.sum())

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        rows: TextRows = batch["text"]
        if not final:
            return self.evaluation.add_loss({"tokens": Term(*self.token_loss(rows))})
        losses, counts = row_losses(self.hidden(self.model, rows), rows.targets, self.model.head_parts)
        self.evaluation.add_loss({"tokens": Term(losses.sum(), rows.targets.count)})
        unigram: Sequence[float | None] = [None] * len(batch.ids)
        if self._unigram is not None:
            unigram = unigram_losses(rows.tokens[:, 1:], rows.targets, self._unigram)
        columns = zip(counts.tolist(), losses.tolist(), unigram, strict=True)
        self.windows.update(batch.ids, [WindowLosses(*window) for window in columns])

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        tokens, _, words = self.text.counts(split)
        batch_size = self.data.batch_size
        batches = self.text.sample_windows(split, batches=self.sampled_batches, batch_size=batch_size, seed=self.seed)
        sums = [self.token_loss(rows.to(self.device)) for rows in batches]
        for prompt in self.prompts:
            (text,) = generate(self.model, self.tokenizer, [prompt], max_tokens=self.prompt_tokens, seed=self.seed)
            sample = {"prompt": prompt, "text": text.text, "line": printable(prompt + text.text)}
            self.evaluation.samples.append(sample)
        estimate = {"loss@sampled": float(sum(s for s, _ in sums) / sum(n for _, n in sums))} if sums else {}
        bits = self._bits_per_nat(split)
        results = {
            "perplexity": math.exp(min(loss, 700.0)),
            "word_perplexity": math.exp(min(loss * tokens / max(1, words), 700.0)),
            "bits_per_byte": loss * bits,
            **estimate,
        }
        if final:
            losses = self.windows.compute()
            results |= self.windows.intervals("bits_per_byte", bits, seed=self.seed)
            results |= {"bits_per_byte@unigram": losses["unigram"] * bits} if "unigram" in losses else {}
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return self.windows.scorers(self._bits_per_nat(self.evaluation.split))

    def _bits_per_nat(self, split: str) -> float:
        """Returns the bits per byte of a split of a loss of one nat per token."""
        counts = self.text.counts(split)
        return counts.tokens / counts.bytes / math.log(2)

    def training_size(self) -> str:
        return f"{self.text.counts('train').tokens:,} tokens"

    def predictions(self) -> list[dict[str, str]]:
        return [{"prompt": sample["prompt"], "text": sample["text"]} for sample in self.evaluation.samples]

    def report(self) -> list[Section]:
        """The continued prompts."""
        return [Section("Samples", [Texts([sample["prompt"] + sample["text"] for sample in self.evaluation.samples])])]

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows = batch["text"]
        segments = rows.tokens.new_ones(rows.tokens.shape) if rows.segments is None else rows.segments
        lines = [f"batch       {text_shape(rows.tokens, segments)}", f"sample      {batch.ids[0]}"]
        return lines + first_row(rows.tokens, segments, self.tokenizer, name="document", limit=tokens)

    def example(self, data: Data, folder: Path) -> str:
        text = self.tokenizer.decode(self.text.tokens(data.final_split).tokens[:64].tolist())
        line = text.partition("\n")[2]  # a split of one file may begin inside a word
        words = [word for word in (line.split() or text.split()[1:] or text.split()) if word.isprintable()]
        return f"vlm generate --prompt {shlex.quote(' '.join(words[:2]))}"
