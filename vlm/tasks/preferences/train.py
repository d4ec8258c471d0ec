"""Training on preferences: of two answers to a prompt, the chosen one becomes likelier than the rejected one."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vlm.data.batch import Batch, TextRows
from vlm.data.text.preference_field import PreferenceField
from vlm.data.text.prompt_field import PromptField
from vlm.errors import Count, Range, UserError, printable
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.report.content import Card, Cards, Section, pick_samples
from vlm.models.context import Context
from vlm.models.decoder import TextDecoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.flop import Work, encoder_flop
from vlm.tasks.captioning.predict import encode_pixels
from vlm.tasks.preferences.metrics import PreferenceMetric, ScoredPair
from vlm.tasks.preferences.objectives import DPO, IPO, Objective, PairScores, SimPO, margins
from vlm.tasks.preferences.reference import (
    ReferenceCache,
    ReferenceModel,
    Start,
    check_cacheable,
    identify_pairs,
    look_up,
)
from vlm.tasks.shared.frozen_models import compute_outputs, describe_computation, read_on_first_rank
from vlm.tasks.shared.show import example_image, example_record, first_row, text_shape
from vlm.tasks.shared.text_tasks import ImageTextTask, TextSearch
from vlm.training.data_module import Data
from vlm.training.image_cache import as_read
from vlm.training.step.fsdp import ShardedStrategy
from vlm.training.step.losses import Term, answer_losses
from vlm.training.step.step import is_logged
from vlm.training.step.task import TaskOptions
from vlm.untrusted.sizes import JsonValue


class Preferences(ImageTextTask):
    """Trains on pairs of answers by DPO, IPO or SimPO; an evaluation scores the pairs of a split.

    Args:
        loss: The objective.
        beta: Its factor; by default 0.1, for SimPO 2.
        gamma: Margin of SimPO; by default 1.
        cross_entropy: Weight of the cross-entropy of the chosen answers, per token (Pang et al. 2024, "Iterative
            Reasoning Preference Optimization", equation 1). It keeps them from becoming less likely together with the
            rejected ones.
        reference: Checkpoint or folder of the reference model; None for the weights from which training starts.
        cache_reference: Whether to compute the log-probabilities of the reference once and to store them in the cache.
        others: As in ImageTextTask; fields are pairs, and images if the model reads them. Label smoothing is that of
            the objective.
    Raises:
        UserError: An option has no effect on the objective.
    """

    name = "preferences"
    headlines = ("accuracy",)
    curves = ("accuracy", "margin")
    text_field, segment_name = "pairs", "answer"
    unit, counted_unit = "samples", "pairs"

    def __init__(
        self,
        *,
        model: VisionLanguageModel | TextDecoder,
        max_tokens: Count,
        loss: Literal["dpo", "ipo", "simpo"] = "dpo",
        beta: Annotated[float, Range(above=0)] | None = None,
        gamma: Annotated[float, Range(0)] | None = None,
        cross_entropy: Annotated[float, Range(0)] = 0.0,
        reference: str | None = None,
        cache_reference: bool = False,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        self.objective, self.cross_entropy = build_objective(loss, beta, gamma, self.label_smoothing), cross_entropy
        if not self.objective.uses_reference and (reference is not None or cache_reference):
            name = "reference" if reference is not None else "cache_reference"
            raise UserError(f"task.{name}: has no effect, because task.loss={loss} needs no reference; leave it out")
        self.reference = ReferenceModel(model, reference, lambda: self.tokenizer)
        self.cache_reference, self._cached = cache_reference, dict[str, list[float]]()
        self._reference_hash = ""
        self._rewards: list[Tensor] = []  # of the batches of a training step
        self.scored = PreferenceMetric(cross_entropy=cross_entropy)
        self.search = TextSearch(self, max_tokens=max_tokens, ends=self.ends)  # its options are stored for the commands
        field = self.fields[self.text_field]
        self.reads_images = isinstance(model, VisionLanguageModel)
        if (
            isinstance(field, PreferenceField)
            and isinstance(model, VisionLanguageModel)
            and model.decoder.prefix is not None
        ):
            field.states = encoder_flop(model.encoder, self.preprocess.image_size)[1].states.shape[1]

    def use_start(self, start: Start, stored: Mapping[str, Any]) -> None:
        self.reference.start = start
        if self.objective.uses_reference:
            self.reference.expected = str(stored.get("reference", ""))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if not self.objective.uses_reference:
            return
        if isinstance(self.trainer.strategy, ShardedStrategy):
            remedy = "use trainer=ddp instead of fsdp, or task.loss=simpo"
            raise UserError(f"task={self.name}: a reference model is not supported with sharded weights; {remedy}")
        if self.cache_reference:
            check_cacheable(self.data.split("train"), self.fields.get("images"))
        self._reference_hash = self.reference.expected = self.reference.hash()
        if self.cache_reference:
            self._cached = {name: scores for split in ("train", "val") for name, scores in self._cache(split).items()}
            self.reference.release()

    def _cache(self, split: str) -> dict[str, list[float]]:
        """Returns the log-probabilities of a split's answers by the reference; computes and stores missing ones."""
        assert self.data.cache_folder is not None
        identity = identify_pairs(self.data.split(split))
        folder, computation = self.data.cache_folder, describe_computation(self)
        cache = ReferenceCache(folder, self._reference_hash, *computation, split, identity)
        if (stored := read_on_first_rank(self, cache.read)) is not None:
            return stored

        def compute(batch: Batch) -> Iterator[tuple[str, list[float]]]:
            rows, model = batch[self.text_field], self.reference.model()
            logprobs, _ = self._score(model, rows, self._encode(model, batch))
            yield from zip(rows.pairs.names, logprobs.tolist(), strict=True)

        scores = compute_outputs(self, self.data.samples(split), f"{split} (reference)", compute)
        if self.trainer.is_global_zero:
            cache.write(scores)
        return scores

    def loss(self, batch: Batch) -> dict[str, Term]:
        reference = self._training_reference(batch)
        scores = PairScores(*self._read(self.model, batch), reference)
        self._rewards.append(self.objective.rewards(scores).detach())
        return self._loss_terms(self.objective.losses(scores), scores)

    def _loss_terms(self, losses: Tensor, scores: PairScores) -> dict[str, Term]:
        """The terms of the loss of some pairs, given the objective's loss of each: (N,)."""
        terms = {"pairs": Term(losses.sum(), len(losses))}
        if self.cross_entropy:
            terms["chosen"] = Term(-scores.logprobs[:, 0].sum(), scores.counts[:, 0].sum(), self.cross_entropy)
        return terms

    def counts(self, batch: Batch) -> dict[str, int] | None:
        if not self.cross_entropy:
            return None
        pairs = batch[self.text_field].pairs
        return {"pairs": len(pairs.names), "chosen": int((pairs.answers % 2 == 0).sum())}

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        rewards, self._rewards = torch.cat(self._rewards), []
        if is_logged(self.global_step + 1, self.trainer):
            gaps = margins(rewards)
            sums = torch.stack([*rewards.unbind(1), gaps, (gaps > 0).to(gaps), torch.ones_like(gaps)]).sum(1)
            *totals, count = self.sum_over_ranks(sums)
            names = ("reward_chosen", "reward_rejected", "margin", "accuracy")
            means = zip(names, totals, strict=True)
            self.log_dict({f"train/{name}": total / count.clamp(min=1) for name, total in means})

    @torch.no_grad()
    def _training_reference(self, batch: Batch) -> Tensor | None:
        """Log-probabilities of a training batch's answers by the reference: (N, 2)."""
        if not self.objective.uses_reference:
            return None
        pairs = batch[self.text_field].pairs
        if self._cached:
            return look_up(self._cached, pairs).to(pairs.answers.device)
        return self._read(self.reference.model(), batch)[0]

    def _read(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and numbers of tokens of a training batch's answers by a model: (N, 2)."""
        rows = batch[self.text_field]
        if not self.reads_images:
            return self._score(model, rows, None)
        texts = (rows.tokens, rows.segments, rows.image_states, rows.scored)
        return _answer_scores(model(as_read(batch["images"], self.preprocess), *texts), rows, model)

    def _encode(self, model: Any, batch: Batch) -> Context | None:
        return encode_pixels(model, self.preprocess, batch["images"]) if self.reads_images else None

    def _score(self, model: Any, rows: TextRows, context: Context | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and numbers of tokens of answers by a model that has encoded their images: (N, 2)."""
        hidden = model(rows.tokens, rows.segments) if context is None else self.read_rows(model, rows, context)
        return _answer_scores(hidden, rows, model)

    def work(self, batch: Batch) -> Work:
        return super().work(batch) if self.reads_images else Work(0, *batch[self.text_field].tokens.shape)

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        if self.reads_images:
            return super().reading(batch, tokens)
        rows = batch[self.text_field]
        lines = [f"batch       {text_shape(rows.tokens, rows.segments)}", f"sample      {batch.ids[0]}"]
        row = (rows.tokens, rows.segments, self.tokenizer)
        return lines + first_row(*row, name=self.segment_name, limit=tokens, scored=rows.scored)

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        """Adds the scores of a batch's pairs; in a final evaluation, also with other images and with a blank one."""
        rows = batch[self.text_field]
        reads_cache = bool(self._cached) and not final  # controls have other images than the cached scores
        models: list[Any] = [self.model]
        models += [self.reference.model()] if self.objective.uses_reference and not reads_cache else []
        contexts = [self._encode(model, batch) for model in models]
        self.evaluation.add_loss(self._loss_terms(*self._add_pairs(models, rows, contexts)))
        if not final or not batch.ids or not self.reads_images:
            return
        blanks = [self.blank(batch["images"], model) for model in models]
        if rows.image_states is None:
            index = torch.zeros(len(rows.tokens), dtype=torch.long, device=self.device)
            blanks = [blank.rows(index) for blank in blanks]
        self._add_pairs(models, rows, blanks, "blank")
        if rows.partners.indices != rows.indices and rows.partners.tokens.numel():  # a lone sample is its own partner
            self._add_pairs(models, rows.partners, contexts, "shuffled")

    def _add_pairs(
        self, models: Sequence[Any], rows: TextRows, contexts: Sequence[Context | None], control: str = ""
    ) -> tuple[Tensor, PairScores]:
        """Adds pairs to the metric, without those of a control that have no image; returns losses (N,) and scores.

        Args:
            models: The trained model, and the reference if its scores are not cached.
            contexts: The images as each model encodes them.
        """
        read = [self._score(model, rows, context) for model, context in zip(models, contexts, strict=True)]
        reference = read[1][0] if len(read) > 1 else None
        if reference is None and self.objective.uses_reference:
            assert rows.pairs is not None
            reference = look_up(self._cached, rows.pairs).to(self.device)
        scores = PairScores(*read[0], reference)
        losses, rewards = self.objective.losses(scores), self.objective.rewards(scores)
        columns = [column.tolist() for column in (losses, rewards, scores.logprobs, scores.counts)]
        has_image = [True] * len(rows.ids) if rows.has_image is None else rows.has_image.tolist()
        pairs = [
            (id, seen, *named)
            for id, seen, row in zip(rows.ids, has_image, rows.references, strict=True)
            for named in row
        ]
        names, scored = list[str](), list[ScoredPair]()
        for (id, seen, name, pair), *values in zip(pairs, *columns, strict=True):
            if seen or not control:
                names.append(name)
                prompt = pair.prompt[-1][1] if pair.prompt else ""
                scored.append(ScoredPair(id, prompt, pair.chosen, pair.rejected, *values))
        self.scored.update(names, scored, control)
        if not control:
            self.evaluation.samples += [{"image_id": pair.image_id, "line": _line(pair)} for pair in scored]
        return losses, scores

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        results = self.scored.compute()
        if final:
            results |= self.scored.compute_controls(loss) | self.scored.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int]:
        return self.scored.scorers(control)

    def description(self) -> dict[str, JsonValue]:
        about = super().description()
        field = self.fields[self.text_field]
        if not self.reads_images:
            about |= {"task": "language_modeling", **self.search.description()}
        elif isinstance(field, PromptField) or not getattr(field, "has_prompts", True):
            about |= {"task": "captioning", **self.search.description()}
        else:
            about["task"] = "image_questions"
        return about | ({"reference": self._reference_hash} if self._reference_hash else {})

    def predictions(self) -> list[dict[str, JsonValue]]:
        return [
            {
                **{name: getattr(pair, name) for name in ("image_id", "prompt", "chosen", "rejected")},
                "prefers_chosen": pair.is_right,
                "margin": pair.rewards[0] - pair.rewards[1],
            }
            for pair in self.scored.pairs.values()
        ]

    def details(self) -> dict[str, JsonValue]:
        return {"pairs": [pair._asdict() for pair in self.scored.pairs.values()]}

    def report(self) -> list[Section]:
        """Random pairs, and pairs of which the model prefers the rejected answer."""
        pairs = list(self.scored.pairs.values())
        kinds = {"Random pairs": pairs, "Wrong preferences": [pair for pair in pairs if not pair.is_right]}
        return [
            Section(title, [Cards([Card(image=pair.image_id, text=_line(pair)) for pair in pick_samples(some)])])
            for title, some in kinds.items()
            if some
        ]

    def example(self, data: Data, folder: Path) -> str:
        if not self.reads_images:
            pair = data.split(data.final_split).record(0)["pairs"][0]
            return f"vlm generate --prompt {shlex.quote(pair.texts[0])}"
        record, _ = example_record(data)
        questions = [pair.prompt[-1][1] for pair in record["pairs"] if pair.prompt]
        image = example_image(data, folder)
        return f"vlm answer {image} --question {shlex.quote(questions[0])}" if questions else f"vlm caption {image}"


def build_objective(loss: str, beta: float | None, gamma: float | None, label_smoothing: float) -> Objective:
    """Returns the objective of this name.

    Args:
        beta, gamma: None for its default.
    Raises:
        UserError: It has no such option, or labels are smoothed by half or more.
    """
    if gamma is not None and loss != "simpo":
        raise UserError(f"task.gamma: has no effect on task.loss={loss}; leave it out, or set task.loss=simpo")
    if label_smoothing and loss == "ipo":
        raise UserError("task.label_smoothing: is not supported by task.loss=ipo; set it to 0")
    if label_smoothing >= 0.5:
        raise UserError(f"task.label_smoothing: {label_smoothing} would prefer the rejected answers; set less than 0.5")
    if loss == "simpo":
        return SimPO(2.0 if beta is None else beta, 1.0 if gamma is None else gamma, label_smoothing)
    factor = 0.1 if beta is None else beta
    return IPO(factor) if loss == "ipo" else DPO(factor, label_smoothing)


def _answer_scores(hidden: Tensor, rows: TextRows, model: Any) -> tuple[Tensor, Tensor]:
    sums, counts = answer_losses(hidden, rows, model.head_parts)
    return -sums, counts


def _line(pair: ScoredPair) -> str:
    sign = ">" if pair.is_right else "<="
    texts = f"{pair.chosen!r} {sign} {pair.rejected!r}"
    return printable(f"{pair.prompt} {texts}".strip())
