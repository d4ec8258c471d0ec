"""Self-critical training (Rennie et al. 2017): captions are sampled, and made likelier the better they score."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import Batch, TextRows, next_token_rows
from vlm.data.text.tokenizer import Tokenizer
from vlm.decoding.loop import decode_batch
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.errors import UserError
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.evaluation.metrics.ngrams import DocumentFrequencies, Floats
from vlm.evaluation.metrics.tokens import units_of
from vlm.models.context import Features
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.nn.vocabulary_loss import Head
from vlm.randomness import key
from vlm.tasks.shared.text_tasks import ImageTextTask
from vlm.training.image_cache import as_read
from vlm.training.step.fsdp import Sharded
from vlm.training.step.losses import Term

RARELY = 0.01  # a word ends a caption badly if a smaller share of the captions with it end in it
CONSTANT = "cider_constant"
REWARDS = (*KEYS, CONSTANT)
T = TypeVar("T")


class CaptionReward:
    """A weighted sum of COCO's metrics for each single caption. CIDEr weighs n-grams by the training captions.

    A further metric, cider_constant, is a caption's mean CIDEr over all training images. With a negative weight it
    subtracts what the caption would earn for any image (after Wang et al. 2020, "Compare and Reweight", who subtract
    what it earns for similar images).

    Args:
        weights: Weight of each metric in `REWARDS`.
        corpus: Reference captions of each training image.
    """

    def __init__(self, weights: Mapping[str, float], corpus: Iterable[Sequence[str]]) -> None:
        self.weights, references = weights, [list(texts) for texts in corpus]
        self.units = units_of(chain.from_iterable(references))
        self.frequencies = DocumentFrequencies.from_references([*map(self.units.cut, texts)] for texts in references)
        if CONSTANT in weights:
            self._corpus = References(_name_in_order(references), units=self.units)

    def __call__(self, captions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Floats:
        """Returns the rewards of K captions of each of B images: (B, K).

        Args:
            references: References of each image.
        """
        if set(self.weights) <= {"cider", CONSTANT}:
            rewards = self.weights.get("cider", 0.0) * self._score_columns(captions, references, References.cider)
        else:
            weights = np.array([self.weights.get(name, 0.0) for name in KEYS])
            rewards = self._score_columns(
                captions, references, lambda prepared, column: prepared.score(column).values @ weights
            )
        if weight := self.weights.get(CONSTANT):
            constants = self._corpus.cider_of_constants(list(chain.from_iterable(captions)))
            rewards += weight * constants.reshape(rewards.shape)
        return rewards

    def _score_columns(
        self,
        captions: Sequence[Sequence[str]],
        references: Sequence[Sequence[str]],
        score: Callable[[References, Mapping[str, str]], Floats],
    ) -> Floats:
        """Returns the score of each caption: (B, K)."""
        texts = map(self.units.cut, chain(chain.from_iterable(captions), chain.from_iterable(references)))
        prepared = References(_name_in_order(references), self.frequencies.among(texts), self.units)
        columns = [_name_in_order(column) for column in zip(*captions, strict=True)]
        return np.stack([score(prepared, column) for column in columns], 1)


def _name_in_order(values: Sequence[T]) -> dict[str, T]:
    """Returns values by names that sort in their order."""
    return {f"{place:09}": value for place, value in enumerate(values)}


class CaptionFaults:
    """Faults of captions that n-gram metrics reward: repeated words, and ends in the middle of a phrase.

    A caption repeats itself if a pair of adjacent words occurs twice. Its end is bad if its last word ends fewer than
    one in a hundred of the training captions that contain it ("a", "of", "with").

    Args:
        corpus: The training captions.
    """

    def __init__(self, corpus: Iterable[str]) -> None:
        captions = list(corpus)
        self.units, self._used, self._ends = units_of(captions), Counter[str](), Counter[str]()
        for tokens in filter(None, map(self.units.cut, captions)):
            self._used.update(set(tokens))
            self._ends[tokens[-1]] += 1

    def shares(self, captions: Iterable[str]) -> dict[str, float]:
        """Returns the share of captions with each fault."""
        texts = [self.units.cut(caption) for caption in captions]
        repeated = sum(max(Counter(pairwise(tokens)).values(), default=0) > 1 for tokens in texts)
        ends = sum(not tokens or self._ends[tokens[-1]] < RARELY * self._used[tokens[-1]] for tokens in texts)
        return {"repeated": repeated / max(1, len(texts)), "bad_endings": ends / max(1, len(texts))}


LIKELIHOOD = "likelihood"

SampledCaptions = list[list[list[int]]]  # tokens of K captions of each of B images, with the end token if one ended


class SelfCritical:
    """Training of a captioner on a metric of captions that it samples.

    Args:
        task: The captioner's task; its training batches will contain references.
        reward: The metric, or the weights of several. A token of a reference caption has the weight of "likelihood", as
            one of a sampled caption has that caption's advantage.
        samples: Number K of captions sampled per image.
    Raises:
        UserError: A metric is unknown, the task smooths labels, which this loss lacks, or captions have languages.
    """

    def __init__(self, task: ImageTextTask, reward: str | Mapping[str, float], *, samples: int) -> None:
        if task.label_smoothing:
            raise UserError("task.label_smoothing: cannot be combined with task.reward; leave one of them out")
        if task.tokenizer.languages:
            raise UserError("task.reward: not supported for captions in several languages; leave it out for these data")
        self.task, self.samples = task, samples
        self.weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
        if unknown := self.weights.keys() - {*REWARDS, LIKELIHOOD}:
            names = ", ".join([*REWARDS, LIKELIHOOD])
            raise UserError(f"task.reward: {sorted(unknown)[0]}: unknown; use {names}")
        self.likelihood = self.weights.pop(LIKELIHOOD, 0.0)
        task.fields[task.text_field].compares = True  # type: ignore[attr-defined]

    @cached_property
    def reward(self) -> CaptionReward:
        """The reward, once the training captions are counted.

        Raises:
            UserError: The weights are sharded.
        """
        if isinstance(self.task.trainer.strategy, Sharded):
            raise UserError("task.reward: not supported with sharded weights; use trainer=ddp instead of fsdp")
        return CaptionReward(self.weights, self._training_captions())

    def loss(self, batch: Batch) -> dict[str, Term]:
        """Returns the loss of a batch, on captions sampled for this step."""
        task, tokenizer, reward = self.task, self.task.tokenizer, self.reward
        images, seed = as_read(batch["images"], task.preprocess), key(task.seed, "reward", task.global_step)
        task.model.eval()
        options = {"count": self.samples, "max_tokens": task.max_tokens, "seed": seed}
        sampled = draw_captions(task.model, images, tokenizer, ids=batch.ids, **options)
        task.train()
        texts = [[tokenizer.decode(tokens) for tokens in captions] for captions in sampled]
        rewards = reward(texts, batch[task.text_field].references)
        task.log("train/reward", float(rewards.mean()))
        with_start = [[[tokenizer.bos_id, *tokens] for tokens in captions] for captions in sampled]
        rows = next_token_rows(with_start, tokenizer.pad_id).to(task.device)  # as in training on a data set
        weights = compute_advantages(torch.from_numpy(rewards)).float().to(task.device)
        hidden = task.model(images, rows.tokens, rows.segments)
        loss = Term(*reward_loss(hidden, rows, weights, task.model.head_parts))
        if self.likelihood:
            reference_loss = ImageTextTask.loss(task, batch)["tokens"]
            loss = Term(loss.total + self.likelihood * reference_loss.total, loss.count + reference_loss.count)
        return {"reward": loss}

    def faults(self, captions: CaptionMetric) -> dict[str, float]:
        """Returns the shares of an evaluation's captions, and of its references, with faults that metrics reward."""
        faults = self._caption_faults
        shares = faults.shares(chain.from_iterable(captions.references.values()))
        reference_shares = {f"{name}@references": share for name, share in shares.items()}
        return faults.shares(captions.predictions.values()) | reference_shares

    @cached_property
    def _caption_faults(self) -> CaptionFaults:
        return CaptionFaults(chain.from_iterable(self._training_captions()))

    def _training_captions(self) -> Iterator[Sequence[str]]:
        split = self.task.data.split("train")
        return (record["references"] for record in split.records())


@torch.no_grad()
def draw_captions(
    model: VisionLanguageModel,
    images: Tensor | Features,
    tokenizer: Tokenizer,
    *,
    ids: Sequence[str],
    count: int,
    max_tokens: int,
    seed: int,
) -> SampledCaptions:
    """Samples captions from a model in evaluation mode; each depends only on seed, id and number.

    Args:
        ids: Names of the images.
        count: Captions per image.
    """
    options = Decoding(sampling=Sampling(), results=count, max_tokens=max_tokens, seed=seed, logprobs=False)
    device = next(model.parameters()).device
    with torch.autocast(device.type, enabled=False):  # it would cast the weights again for every token
        context, bos_id, eos_id = model.encode(images), tokenizer.bos_id, tokenizer.eos_id
        hypotheses = decode_batch(model.decoder, context, options, bos_id=bos_id, eos_id=eos_id, ids=ids)
    return [[text.tokens for text in texts] for texts in hypotheses]


def compute_advantages(rewards: Tensor) -> Tensor:
    """Subtracts from each reward the mean of the image's other rewards: (B, K) -> (B, K); each row sums to 0."""
    count = rewards.shape[1]
    return (count * rewards - rewards.sum(1, keepdim=True)) / (count - 1)


def reward_loss(hidden: Tensor, rows: TextRows, weights: Tensor, head: Head) -> tuple[Tensor, int]:
    """Returns the sum of the sampled tokens' cross-entropies, weighted by their caption's advantage, and their number.

    Its gradient is that of the expected reward, with the sign of a loss (Williams 1992).

    Shapes:
        hidden (B, L, D), weights (B, K) -> sum ()
    """
    assert rows.segments is not None
    picked, labels = head.apply_transform(rows.targets.pick(hidden)), rows.targets.labels
    losses = F.cross_entropy(F.linear(picked, head.weight, head.bias).float(), labels, reduction="none")  # (T,)
    by_token = weights.gather(1, (rows.segments - 1).clamp(min=0))  # (B, L); padding has no target
    return (losses * rows.targets.pick(by_token[..., None])[:, 0]).sum(), rows.targets.count
