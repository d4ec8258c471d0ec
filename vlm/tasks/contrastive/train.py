"""Contrastive training of images and texts, which are embedded in one space, scored by recall over a whole split."""

import shlex
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import Batch, InputRows
from vlm.data.text.inputs import OneCaptionField
from vlm.errors import UserError, printable
from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer, intervals
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.evaluation.report.content import MAX_SAMPLES, Card, Cards, Section, pick_samples
from vlm.models.context import Features
from vlm.models.dual_encoder import DualEncoder
from vlm.models.flop import Work
from vlm.tasks.contrastive.predict import embed_pixels, embed_rows
from vlm.tasks.shared.comparison import DEPTHS
from vlm.tasks.shared.show import example_image, image_shape, row_lines, text_shape
from vlm.training.data_module import Data
from vlm.training.image_cache import as_read
from vlm.training.step.losses import Term
from vlm.training.step.task import Task, TaskOptions

NAMES = tuple(f"{side}_recall_{depth}" for side in ("text", "image") for depth in DEPTHS)
AT_ONCE = 512  # queries whose products with all candidates are in memory at a time
CLASSES = 3  # captions in the example's command to choose among


def rank_candidates(
    queries: Tensor, of_query: Tensor, candidates: Tensor, of_candidate: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns, for each query, the number of wrong candidates before the first right one, and the first candidate.

    In a tie, wrong candidates come first, so that identical embeddings find nothing.

    Args:
        of_query, of_candidate: The image that each belongs to; a candidate of the same image is right.
    Shapes:
        queries (Q, E), of_query (Q,), candidates (C, E), of_candidate (C,) -> (Q,), (Q,)
    """
    parts = []
    for part, owners in zip(queries.split(AT_ONCE), of_query.split(AT_ONCE), strict=True):
        products, right = part @ candidates.T, owners[:, None] == of_candidate  # (AT_ONCE, C)
        best = products.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
        parts.append((((products >= best) & ~right).sum(1), products.argmax(1)))
    rank_parts, first_parts = zip(*parts, strict=True)
    return torch.cat(rank_parts), torch.cat(first_parts)


class RetrievalMetric(RecordMetric):
    """Recall among all images and captions of a split, in both directions (Karpathy and Fei-Fei 2015).

    An image counts as right if any of its captions is among the first k, a caption if its image is.

    Attributes:
        captions: Captions of each image of the last `compute`, by id.
        ranks: For each image, the number of other images' captions before the first of its own.
        first: The first caption that each image retrieves.
    """

    captions: dict[str, list[str]]
    ranks: list[int]
    first: list[str]

    def update(
        self, ids: Sequence[str], captions: Sequence[Sequence[str]], images: Tensor, texts: Sequence[Tensor]
    ) -> None:
        """Adds some images.

        Args:
            texts: Embeddings of each image's captions, followed by those of the captions with shuffled words.
        Shapes:
            images (B, E), texts B times (2 * number of captions, E)
        """
        rows = zip(ids, captions, images.cpu(), texts, strict=True)
        self.add(
            (id, list(texts_of_image), _pack(image), _pack(embeddings.cpu()))
            for id, texts_of_image, image, embeddings in rows
        )

    def compute(self) -> dict[str, float]:
        """Returns text_recall_K of images, image_recall_K of captions, and recall, the mean of all.

        Raises:
            UserError: Nothing was added.
        """
        rows = self.rows()
        if not rows:
            raise UserError("nothing to rank: no image could be read, or the split is empty", status=1)
        self.captions = {id: captions for id, (captions, _, _) in rows.items()}
        self._images = torch.stack([_unpack(image) for _, image, _ in rows.values()])  # (N, E)
        pairs = [_unpack(embeddings).view(2, len(captions), -1) for captions, _, embeddings in rows.values()]
        self._texts, self._bags = torch.cat(pairs, dim=1)  # (M, E) each
        self._owners = torch.arange(len(rows)).repeat_interleave(torch.tensor([pair.shape[1] for pair in pairs]))
        wrong_before, first = rank_candidates(self._images, torch.arange(len(rows)), self._texts, self._owners)
        texts = [caption for captions in self.captions.values() for caption in captions]
        self.ranks, self.first = wrong_before.tolist(), [texts[place] for place in first.tolist()]
        self._hits = self._hits_of(self._texts, self._owners)
        return self._recalls(self._hits)

    def loss(self, scale: float) -> float:
        """Returns the loss of all images with their first captions as one batch, in nats per pair."""
        firsts = torch.searchsorted(self._owners, torch.arange(len(self._images)))
        sides, total = (self._images, self._texts[firsts]), 0.0
        places = torch.arange(len(self._images)).split(AT_ONCE)
        for queries, candidates in (sides, sides[::-1]):
            for part, targets in zip(queries.split(AT_ONCE), places, strict=True):
                total += F.cross_entropy(scale * part @ candidates.T, targets, reduction="sum").item()
        return total / 2 / len(self._images)

    def controls(self) -> dict[str, float]:
        """Returns metric@chance, metric@shuffled and metric@bag.

        These are of candidates in random order, of captions assigned to other images, and of captions whose words are
        shuffled.
        """
        count, texts = len(self._images), len(self._owners)
        sizes = [len(captions) for captions in self.captions.values()]
        none = [[comb(texts - size, depth) / max(1, comb(texts, depth)) for size in sizes] for depth in DEPTHS]
        chances = [1 - sum(misses) / count for misses in none] + [min(1.0, depth / count) for depth in DEPTHS]
        self._shuffled = self._hits_of(self._texts, (self._owners + count // 2) % count)
        shuffled = self._recalls(self._shuffled)
        bag = self._recalls(self._hits_of(self._bags, self._owners))
        controls = {"chance": _name_recalls(chances), "shuffled": shuffled, "bag": bag}
        return {f"{name}@{control}": value for control, values in controls.items() for name, value in values.items()}

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns metric@low and metric@high: 95% intervals by bootstrap over images with their captions."""
        return intervals(NAMES, _recall_scorer(self._hits), len(self._hits), seed=seed)

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        """Returns the scorers of a metric of the model and of the shuffled control, and the number of images."""
        if control != "shuffled":
            return None
        place = NAMES.index(metric)
        model, baseline = (column_scorer(_recall_scorer(hits), place) for hits in (self._hits, self._shuffled))
        return model, baseline, len(self._hits)

    def _hits_of(self, texts: Tensor, owners: Tensor) -> Floats:
        """Per image: hit@K for image to text, hits@K for text to image, number of captions.

        Shapes:
            texts (M, E), owners (M,) -> (N, 2 * depths + 1)
        """
        depths, places = torch.tensor(DEPTHS), torch.arange(len(self._images))
        of_images = rank_candidates(self._images, places, texts, owners)[0][:, None] < depths
        of_texts = rank_candidates(texts, owners, self._images, places)[0][:, None] < depths
        sums = torch.zeros(len(places), len(DEPTHS) + 1, dtype=torch.float64)
        sums.index_add_(0, owners, F.pad(of_texts.double(), (0, 1), value=1.0))
        return torch.cat([of_images.double(), sums], dim=1).numpy()

    def _recalls(self, hits: Floats) -> dict[str, float]:
        sums = hits.sum(0)
        shares = sums[:-1] / np.repeat([len(hits), sums[-1]], len(DEPTHS))
        return _name_recalls(shares.tolist())


def _recall_scorer(hits: Floats) -> Scorer:
    """Recalls of resampled images with their captions, in the order of NAMES."""

    def score(draws: Floats) -> Floats:
        sums = draws @ hits
        return sums[:, :-1] / np.repeat(np.column_stack([draws.sum(1), sums[:, -1]]), len(DEPTHS), axis=1)

    return score


def _name_recalls(shares: Sequence[float]) -> dict[str, float]:
    return {**dict(zip(NAMES, shares, strict=True)), "recall": sum(shares) / len(shares)}


def _pack(rows: Tensor) -> str:
    return b64encode(rows.float().numpy().tobytes()).decode("ascii")


def _unpack(text: str) -> Tensor:
    return torch.frombuffer(bytearray(b64decode(text)), dtype=torch.float32)


def contrastive_loss(
    images: Tensor, texts: Tensor, scale: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, int]:
    """Symmetric cross-entropy in nats of picking each pair's other half (Radford et al. 2021), summed over the pairs.

    A pair is picked among all pairs of the batch on all ranks. Batches must therefore not be accumulated: see
    `Task.compares_samples`.

    Args:
        scale: Factor of the products, one over the temperature.
        label_smoothing: Share of the target spread evenly over all pairs (Jia et al. 2021, "ALIGN").
    Shapes:
        images (B, D), texts (B, D) of norm 1, scale () -> sum (), and the number B of this rank's pairs
    """
    exact = torch.promote_types(images.dtype, torch.float32)
    images, texts = images.to(exact), texts.to(exact)
    pairs, first = gather_rows(torch.cat([images, texts], dim=1))
    all_images, all_texts = pairs.chunk(2, dim=1)
    places = torch.arange(first, first + len(images), device=images.device)
    # In bfloat16 a logit near 100 may be wrong by a quarter.
    with torch.autocast(images.device.type, enabled=False):
        logits = [scale * images @ all_texts.T, scale * texts @ all_images.T]  # (B, all pairs) each
        losses = [F.cross_entropy(x, places, reduction="sum", label_smoothing=label_smoothing) for x in logits]
    return (losses[0] + losses[1]) / 2, len(images)


def sigmoid_loss(images: Tensor, texts: Tensor, scale: Tensor, bias: Tensor) -> tuple[Tensor, int]:
    """Binary cross-entropy in nats of whether each pair of halves in the batch matches (Zhai et al. 2023), summed.

    This rank's images are paired with the texts of all ranks.

    Args:
        bias: Added to the scaled products.
    Shapes:
        images (B, D), texts (B, D) of norm 1, scale (), bias () -> sum (), and the number B of this rank's pairs
    """
    exact = torch.promote_types(images.dtype, torch.float32)
    all_texts, first = gather_rows(texts.to(exact))
    places = torch.arange(first, first + len(images), device=images.device)
    with torch.autocast(images.device.type, enabled=False):
        logits = scale * images.to(exact) @ all_texts.T + bias  # (B, all pairs)
        signs = torch.full_like(logits, -1).scatter_(1, places[:, None], 1)
        return -F.logsigmoid(signs * logits).sum(), len(images)


def gather_rows(rows: Tensor) -> tuple[Tensor, int]:
    """Concatenates the rows of all ranks; also returns the index of this rank's first row. Differentiable.

    Ranks may have different numbers of rows. They exchange these numbers first, for which the host waits.

    Shapes:
        rows (B, D) -> (sum of all B, D)
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows, 0
    sizes = [torch.zeros(1, dtype=torch.long, device=rows.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.full_like(sizes[0], len(rows)))
    counts = torch.cat(sizes).tolist()
    return _GatherRows.apply(rows, counts), sum(counts[: dist.get_rank()])


class _GatherRows(torch.autograd.Function):
    """The gradient of a row is the sum of its gradients on all ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        padded = F.pad(rows, (0, 0, 0, max(counts) - len(rows)))
        gathered = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(gathered, padded)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        summed = grads[0].contiguous().clone()
        dist.all_reduce(summed)
        return summed.split(ctx.counts)[dist.get_rank()], None


class Contrastive(Task):
    """Trains by picking each image's caption, and each caption's image, among all of a batch (Radford et al. 2021).

    A model with a bias uses the sigmoid loss: it learns for each pair whether it matches (Zhai et al. 2023).

    Args:
        model, options: As in Task; the model is a DualEncoder.
        fields: images, and captions, one per image.
    """

    name = "contrastive"
    headlines = ("text_recall_1", "image_recall_1", "text_recall_10", "image_recall_10")
    curves = ("text_recall_1", "image_recall_1", "text_recall_10", "image_recall_10", "temperature")
    ablations = ("bag",)  # the model's own scores of captions with shuffled words
    counted_unit = "pairs"
    model: DualEncoder

    def __init__(self, *, model: DualEncoder, **options: Unpack[TaskOptions]) -> None:
        super().__init__(model=model, **options)
        if model.bias is not None and self.label_smoothing:
            raise ValueError("label_smoothing is not supported by the sigmoid loss (model.bias); set it to 0")
        self.field: OneCaptionField = options["fields"]["captions"]
        self.metric = RetrievalMetric()

    @classmethod
    def compares_samples(cls, options: Mapping[str, Any]) -> bool:
        return True

    def work(self, batch: Batch) -> Work:
        rows, length = batch["captions"].tokens.shape
        return Work(len(batch.ids), rows, length, cached=isinstance(batch["images"], Features))

    def loss(self, batch: Batch) -> dict[str, Term]:
        rows: InputRows = batch["captions"]
        pixels, smoothing = as_read(batch["images"], self.preprocess), self.label_smoothing
        images, texts, scale = self.model(pixels, rows.tokens, rows.segments, rows.places, rows.layout)
        if self.model.bias is not None:
            return {"pairs": Term(*sigmoid_loss(images, texts, scale, self.model.bias))}
        return {"pairs": Term(*contrastive_loss(images, texts, scale, label_smoothing=smoothing))}

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.model.clamp_scale()

    def evaluation_step(self, batch: Batch, *, final: bool) -> None:
        rows: InputRows = batch["captions"]
        images = embed_pixels(self.model, self.preprocess, batch["images"])
        texts = embed_rows(self.model, rows).split(list(rows.counts))
        self.metric.update(batch.ids, rows.texts, images, texts)

    def evaluation_results(self, split: str, loss: float, *, final: bool) -> dict[str, float]:
        recalls, scale = self.metric.compute(), self.model.scale.item()
        results = {"loss": self.metric.loss(scale), **recalls, "temperature": 1 / scale}
        rows = self.predictions()
        self.evaluation.samples = [{**row, "line": _line(row)} for row in pick_samples(rows)]
        if final:
            results |= self.metric.controls() | self.metric.intervals(seed=self.seed)
        return results

    def scorers(self, metric: str, control: str) -> tuple[Scorer, Scorer, int] | None:
        return self.metric.scorers(metric, control)

    def predictions(self) -> list[dict[str, Any]]:
        """Returns the first caption that each image retrieves, and the rank of the first one of its own."""
        rows = zip(self.metric.captions, self.metric.first, self.metric.ranks, strict=True)
        return [{"image_id": id, "caption": first, "rank": 1 + rank} for id, first, rank in rows]

    def report(self) -> list[Section]:
        """Returns images with their first retrieved caption: random ones and those whose caption has the worst rank."""
        rows, captions = self.predictions(), self.metric.captions
        last = sorted(rows, key=lambda row: -row["rank"])[:MAX_SAMPLES]
        kinds = {"Random images": pick_samples(rows), "Worst ranks": last}
        sections = []
        for title, some in kinds.items():
            cards = []
            for row in some:
                image, lines = row["image_id"], [f"own caption: rank {row['rank']:,}", row["image_id"]]
                cards.append(Card(image=image, text=row["caption"], lines=lines, references=captions[image]))
            sections.append(Section(title, [Cards(cards)]))
        return sections

    def reading(self, batch: Batch, tokens: int) -> list[str]:
        rows: InputRows = batch["captions"]
        shapes = f"{image_shape(batch['images'])}, {text_shape(rows.tokens, rows.segments)}"
        lines = [f"batch       {shapes}", f"sample      {batch.ids[0]}"]
        return [*lines, *row_lines(rows, self.field.tokenizer, limit=tokens)]

    def example(self, data: Data, folder: Path) -> str:
        split = data.split(data.final_split)
        captions = [self.field.references_of(split.record(at))[0] for at in range(min(CLASSES, len(split)))]
        labels = " ".join(f"--label {shlex.quote(caption)}" for caption in dict.fromkeys(captions))
        return f"vlm classify {example_image(data, folder)} {labels}"


def _line(row: Mapping[str, Any]) -> str:
    mark = "=" if row["rank"] == 1 else " "
    rank = "" if row["rank"] == 1 else f"; its own caption has rank {row['rank']:,}"
    return f"{mark} {row['image_id']}: {printable(row['caption'])!r}{rank}"
