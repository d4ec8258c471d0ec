"""Image captioning: generates a description of an image."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, Unpack

import torch
from torch import Tensor

from vlm.data.batch import Batch, PromptRows, TextRows
from vlm.errors import Count, Range, UserError
from vlm.evaluation.metrics.bootstrap import Scorer
from vlm.evaluation.metrics.captions import ScoredCaption
from vlm.evaluation.report.content import MAX_SAMPLES, Card, Cards, Finding, Note, Pictures, Section, pick_samples
from vlm.inference.attention.maps import caption_word_maps
from vlm.inference.attention.pictures import draw_bands
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.recurrent import SoftAttentionDecoder
from vlm.nn.position import segment_positions
from vlm.tasks.captioning.metrics import ENCODER, CaptionFaults, LanguageMetrics
from vlm.tasks.captioning.predict import encode_pixels
from vlm.tasks.shared.distillation import DistilledTask, Teacher, TokenDistillation
from vlm.tasks.shared.policy_gradient import RewardedTextTask, RewardOptions
from vlm.tasks.shared.show import caption_line, example_image
from vlm.tasks.shared.text_tasks import TextSearch, prompt_contexts
from vlm.training.data_module import Data
from vlm.training.image_cache import as_read
from vlm.training.step.losses import Term, check_dropout, consistent_terms, token_loss
from vlm.untrusted.sizes import JsonValue


class DoublyStochastic:
    """The loss of Xu et al. (2015, equation 14), averaged over tokens: cross-entropy plus the doubly stochastic term.

    Args:
        task: The captioning task.
        weight: Factor of the term, lambda.
    Raises:
        UserError: The task's decoder has no soft attention, or the task trains on a reward.
    """

    def __init__(self, task: Any, weight: float) -> None:
        if not isinstance(task.model.decoder, SoftAttentionDecoder):
            remedy = "choose model=show_attend_tell or set it to 0"
            raise UserError(f"task.doubly_stochastic: needs soft attention; {remedy}")
        if task.critic is not None:
            raise UserError("task.doubly_stochastic: cannot be combined with task.reward; leave one of them out")
        self.task, self.weight = task, weight

    def loss(self, batch: Batch) -> dict[str, Term]:
        task, rows = self.task, batch["captions"]
        context = task.model.encode(as_read(batch["images"], task.preprocess))
        hidden, weights = task.model.decoder.attend(rows.tokens, rows.segments, context)
        smoothing = task.label_smoothing
        total, count = token_loss(hidden, rows.targets, task.model.head_parts, label_smoothing=smoothing)
        return {"tokens": Term(total + self.weight * doubly_stochastic_term(weights, rows), count)}


def doubly_stochastic_term(weights: Tensor, rows: TextRows) -> Tensor:
    """Returns the term, summed over captions: sum_i (1 - sum_t a_ti)^2 over image parts i and predicted tokens t.

    Shapes:
        weights (B, L, S) -> ()
    """
    assert rows.segments is not None
    begin = ((segment_positions(rows.segments) == 0) & (rows.segments != 0)).flatten()
    number = begin.cumsum(0)  # number of each token's caption, from 1
    places = slice(None) if rows.targets.places is None else rows.targets.places
    attended = weights.new_zeros(len(number) + 1, weights.shape[2])  # there are fewer captions than tokens
    attended = attended.index_add(0, number[places], weights.flatten(0, 1)[places])  # (captions + 1 or more, S)
    index = torch.arange(len(attended), device=attended.device)
    is_caption = (index > 0) & (index <= begin.sum())
    return ((1 - attended).square().sum(1) * is_caption).sum()


LEGEND = [
    "distinct: share of different captions; novelty: share of captions that train lacks",
    "vocabulary: number of different words; length_ratio: length of captions / that of references",
]
LOOKED_AT = 3  # captions in the report that have pictures of the model's attention


class Captioning(DistilledTask, RewardedTextTask):
    """Trains by next-token prediction, or on a metric of sampled captions; validates on generated captions.

    With several languages, each image is captioned in each, and scored in those in which it has references.

    Args:
        beam, length_penalty: The search of a test, and of the commands by default; validations are greedy.
        val_captions: Images that a validation captions; None for all.
        doubly_stochastic: Factor of the term that spreads soft attention over an image (Xu et al. 2015); 0 for none.
        consistency: Factor of the divergence of two passes with other dropout (R-Drop, Liang et al. 2021); 0 for none.
        teacher: A model whose predictions the trained model learns; None for none.
        others: As in RewardedTextTask; fields are images, and captions.
    """

    name = "captioning"
    headlines = ("cider", "bleu4", "rouge_l", "exact_match")
    curves = ("cider", "bleu4", "exact_match", "distinct", "length_ratio")
    text_field, segment_name = "captions", "caption"

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        max_tokens: Count,
        beam: Count = 1,
        length_penalty: float = 1.0,
        val_captions: Count | None = None,
        doubly_stochastic: Annotated[float, Range(0)] = 0.0,
        consistency: Annotated[float, Range(0)] = 0.0,
        teacher: Teacher | None = None,
        **options: Unpack[RewardOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)
        self.metrics = LanguageMetrics(self.fields[self.text_field].languages)  # type: ignore[attr-defined]
        self.val_captions = None if val_captions is None else val_captions * len(self.metrics.languages)
        self.search = TextSearch(self, max_tokens=max_tokens, beam=beam, length_penalty=length_penalty, ends=self.ends)
        self._findings: list[Finding] = []
        self.spread = DoublyStochastic(self, doubly_stochastic) if doubly_stochastic else None
        self.consistency = consistency
        has_teacher = teacher is not None and teacher.path is not None
        used = {"reward": self.critic, "doubly_stochastic": self.spread, "teacher": has_teacher}
        if consistency:
            check_dropout(model)
            for name in (name for name, value in used.items() if value):
                raise UserError(f"task.consistency: cannot be combined with task.{name}; leave one of them out")
        if teacher is not None and teacher.path is not None:
            if self.critic or self.spread:
                name = "reward" if self.critic else "doubly_stochastic"
                raise UserError(f"task.{name}: cannot be combined with task.teacher; leave one of them out")
            self.distillation = TokenDistillation(self, VisionLanguageModel, teacher, self.hidden, self.text_field)

    def loss(self, batch: Batch) -> dict[str, Term]:
        if self.spread is not None:
            return self.spread.loss(batch)
        if self.distillation is None and not self.consistency:
            return super().loss(batch)
        images: Any = as_read(batch["images"], self.preprocess)
        hidden = self.hidden(self.model, batch, images)
        if self.distillation is not None:
            return self.distillation.terms(batch, {"tokens": self.token_term(batch, hidden)}, hidden, images)
        passes, targets = (hidden, self.hidden(self.model, batch, images)), batch[self.text_field].targets
        options = {"weight": self.consistency, "label_smoothing": self.label_smoothing}
        return consistent_terms(passes, targets, self.model.head_parts, **options)

    def counts(self, batch: Batch) -> dict[str, int] | None:
        count = batch["captions"].targets.count
        if self.consistency:
            return {"tokens": count, "consistency": count}
        return self.distilled_counts(batch, "tokens", count)

    @cached_property
    def caption_faults(self) -> CaptionFaults:
        """Counts the last words of the training captions."""
        references = (record["references"] for record in self.data.split("train").records())
        return CaptionFaults(chain.from_iterable(references))

    def on_evaluation_start(self) -> None:
        super().on_evaluation_start()
        self.search.begin()

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        pixels, rows = batch["images"], batch["captions"]
        context = encode_pixels(self.model, self.preprocess, pixels)  # shared by losses and captions
        losses = self.add_losses(batch, context)
        if not final and self.evaluation.has_samples(self.val_captions):
            return
        contexts = [context]
        if isinstance(rows, PromptRows):
            last = [end // context.states.shape[1] - 1 for end in accumulate(rows.num_states)]
            pixels, contexts = pixels[last], [*prompt_contexts(rows, context.states)]  # each image as a whole
        samples: list[dict[str, Any]] = []
        for language, metric in self.metrics.items():
            parts = (self.search.texts(part, final=final, language=language) for part in contexts)
            captions = [caption for part in parts for caption in part]
            texts = [caption.text for caption in captions]
            unfinished = [len(caption.tokens) >= self.max_tokens for caption in captions]
            columns = batch.ids, texts, rows.references_in(language), losses, pixels, unfinished
            rows_of_images: list[Any] = list(zip(*columns, strict=True))
            scored = [row for row in rows_of_images if row[2] or language is None]  # some have no reference in it
            metric.update(*([row[at] for row in scored] for at in (0, 1, 2, 3, 5)))
            for id, text, references, loss, image, _ in scored:
                line = caption_line(text, references)
                sample = {"image_id": id, "caption": text, "references": references, "loss": loss, "image": image}
                named = {"line": line} if language is None else {"language": language, "line": f"{language} {line}"}
                samples.append(sample | named)
        self.evaluation.samples += sorted(samples, key=lambda sample: batch.ids.index(sample["image_id"]))

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        self.search.end()
        results = self.metrics.compute() | self.grounding.results(loss, self.sum_over_ranks)
        results |= self.caption_faults.compare(self.metrics.first) if self.critic else {}
        if final:
            results |= self.metrics.compute_test_scores(self.data.split("train"), seed=self.seed)
        self._findings = self.metrics.findings(results, max_tokens=self.max_tokens, beam=self.search.search.beam)
        return results

    @property
    def remark(self) -> str:  # type: ignore[override]
        return self.metrics.note

    def notes(self) -> list[str]:
        remark = [f"({line})" for line in (*LEGEND, self.remark) if line]
        return [*remark, *(line for finding in self.findings() for line in finding.lines())]

    def findings(self) -> list[Finding]:
        if not self.trained.is_pretrained:
            return self._findings
        remedies = ([remedy for remedy in finding.remedies if remedy != ENCODER] for finding in self._findings)
        return [Finding(finding.fault, fit) for finding, fit in zip(self._findings, remedies, strict=True)]

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return None if len(self.metrics.languages) > 1 else self.metrics.first.scorers(metric, control)

    def remedies(self, results: Mapping[str, float]) -> Sequence[str] | None:
        findings = self.findings()
        return findings[0].remedies[:2] if findings else None  # more specific than those of any task

    def details(self) -> dict[str, dict[str, ScoredCaption]]:
        return self.metrics.per_image()

    def predictions(self) -> list[dict[str, str]]:
        return self.metrics.predictions()

    def report(self) -> list[Section]:
        """Random captions, the best and the worst by CIDEr and ROUGE-L, and attention maps."""
        sections = []
        for language, metric in self.metrics.items():
            rows, title = metric.per_image(), "" if language is None else f" ({language})"
            ranked = sorted(rows, key=lambda name: (-rows[name]["cider"], -rows[name]["rouge_l"], name))
            count = min(MAX_SAMPLES, -(-len(ranked) // 2))
            kinds = {"Random captions": pick_samples(ranked)}
            kinds |= {"Best captions": ranked[:count], "Worst captions": ranked[::-1][:count]}
            for kind, names in kinds.items():
                cards = []
                for name in names:
                    row = rows[name]
                    scores = f"CIDEr {row['cider']:.2f}, ROUGE-L {row['rouge_l']:.2f}"
                    scores += f", loss {row['loss']:.2f}" if "loss" in row else ""
                    lines, references = [scores, name], row["references"]
                    cards.append(Card(image=name, text=row["caption"], lines=lines, references=references))
                sections.append(Section(kind + title, [Cards(cards)]))
        pictures = []
        for sample in self.evaluation.samples[:LOOKED_AT]:
            pixels, caption = sample["image"].to(self.device), sample["caption"]
            reading = (self.model, self.tokenizer, self.preprocess, pixels)
            if maps := caption_word_maps(*reading, caption, sample.get("language")):  # if its layers offer that
                pictures.append((caption, draw_bands(pixels, [("", maps)])))
        if pictures:
            note = "Bright regions have high attention weights in the last layer (mean over heads) for the word above."
            sections.append(Section("Attention maps", [Note(note), Pictures(pictures)]))
        return sections

    def description(self) -> dict[str, JsonValue]:
        return {**super().description(), **self.search.description()}

    def example(self, data: Data, folder: Path) -> str:
        return f"vlm caption {example_image(data, folder)}"
