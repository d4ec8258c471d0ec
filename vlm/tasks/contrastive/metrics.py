"""Recall of texts by images and of images by texts, over a whole split; exact over any number of processes."""

from base64 import b64decode, b64encode
from collections.abc import Sequence
from math import comb

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, column_scorer, intervals
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric
from vlm.tasks.shared.comparison import DEPTHS

NAMES = tuple(f"{side}_recall_{depth}" for side in ("text", "image") for depth in DEPTHS)
AT_ONCE = 512  # queries whose products with all candidates are in memory at a time


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
