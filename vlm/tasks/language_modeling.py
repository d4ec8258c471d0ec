"""Language modelling: the decoder, with no context, predicts text token by token."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.windows import TextBatch
from vlm.errors import Count, Share
from vlm.inference.files import printable
from vlm.inference.generating import generate
from vlm.models.decoder import Decoder
from vlm.models.flop import Work
from vlm.training.losses import IGNORE, next_token_labels, token_loss
from vlm.training.optim import Optimization
from vlm.training.show import first_row, text_shape
from vlm.training.task import Task


class LanguageModeling(Task):
    """Trains and validates by next-token prediction.

    Args:
        model, optimization, seed, freeze: As in Task; the model is a Decoder without context.
        tokenizer: Reads and writes text.
        label_smoothing: Share of the target spread evenly over the vocabulary.
        sampled_batches: Random batches of nanoGPT's estimate of the loss, beside that of the whole split.
        prompts: Texts that each validation continues, to look at; an empty one starts a document.
        prompt_tokens: How far it continues them.
    """

    name = "language_modeling"
    unit = "tokens"
    model: Decoder

    def __init__(
        self,
        *,
        model: Decoder,
        tokenizer: Tokenizer,
        seed: int,
        optimization: Optimization | None = None,
        freeze: Sequence[str] = (),
        label_smoothing: Share = 0.0,
        sampled_batches: Count = 200,
        prompts: Sequence[str] = ("",),
        prompt_tokens: Count = 64,
    ) -> None:
        super().__init__(model=model, optimization=optimization, seed=seed, freeze=freeze)
        self.tokenizer, self.label_smoothing, self.sampled_batches = tokenizer, label_smoothing, sampled_batches
        self.prompts, self.prompt_tokens = prompts, prompt_tokens

    def size(self, batch: TextBatch) -> int:
        return batch.tokens[:, 1:].numel()

    def work(self, batch: TextBatch) -> Work:
        return Work(0, *batch.tokens[:, 1:].shape)

    def token_loss(self, batch: TextBatch, *, label_smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """Summed cross-entropy in nats, and the number of tokens predicted."""
        labels = next_token_labels(batch.tokens, batch.segments)[:, :-1]  # the last token only is a target
        if batch.scored is not None:
            labels = labels.masked_fill(~batch.scored[:, 1:], IGNORE)
        segments = None if batch.segments is None else batch.segments[:, :-1]
        hidden = self.model(batch.tokens[:, :-1], segments)
        return token_loss(hidden, labels, self.model.head_weight, label_smoothing=label_smoothing)

    def loss(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        return self.token_loss(batch, label_smoothing=self.label_smoothing)

    def validation_step(self, batch: TextBatch, batch_idx: int) -> None:
        self.add_loss(*self.token_loss(batch))

    def test_step(self, batch: TextBatch, batch_idx: int) -> None:
        self.add_loss(*self.token_loss(batch))

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        tokens, size, words = data.counts(split)
        batches = data.sampled_windows(split, batches=self.sampled_batches, batch_size=data.batch_size, seed=self.seed)
        sums = [self.token_loss(self.transfer_batch_to_device(batch, self.device, 0)) for batch in batches]
        self.samples = [self._sample(prompt) for prompt in self.prompts]
        estimate = {"loss@sampled": float(sum(s for s, _ in sums) / sum(n for _, n in sums))} if sums else {}
        return {
            "perplexity": math.exp(min(loss, 700.0)),
            "word_perplexity": math.exp(min(loss * tokens / max(1, words), 700.0)),
            "bits_per_byte": loss * tokens / size / math.log(2),
            **estimate,
        }

    def _sample(self, prompt: str) -> dict[str, Any]:
        (text,) = generate(self.model, self.tokenizer, [prompt], max_tokens=self.prompt_tokens, seed=self.seed)
        return {"prompt": prompt, "text": text.text, "line": printable(prompt + text.text)}

    def predictions(self) -> list[dict[str, Any]]:
        return [{"prompt": sample["prompt"], "text": sample["text"]} for sample in self.samples]

    def reading(self, batch: TextBatch, tokens: int) -> list[str]:
        segments = batch.tokens.new_ones(batch.tokens.shape) if batch.segments is None else batch.segments
        lines = [f"batch       {text_shape(batch.tokens, segments)}", f"sample      {batch.ids[0]}"]
        return lines + first_row(batch.tokens, segments, self.tokenizer, name="document", shown=tokens)

    def example(self, data: Any, folder: Path) -> str:
        first = self.tokenizer.decode(data.tokens(data.final_split).tokens[:64].tolist()).split()
        return f"vlm generate --prompt {shlex.quote(' '.join(first[:2]))}"

    def description(self) -> dict[str, Any]:
        return {"task": self.name, "tokenizer": self.tokenizer.state()}
