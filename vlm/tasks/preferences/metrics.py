"""Scores of training on preferences: how often the chosen answer has the higher reward, beside controls."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vlm.errors import UserError
from vlm.evaluation.metrics.bootstrap import Scorer, intervals, ratio_scorer
from vlm.evaluation.metrics.ngrams import Floats
from vlm.evaluation.metrics.records import RecordMetric

CONTROLS = ("shuffled", "blank")  # with another image, and with a blank one


class ScoredPair(NamedTuple):
    """A pair in an evaluation.

    Args:
        image_id: Id of its record.
        prompt: Its last turn; "" for captions.
        chosen, rejected: The answers.
        loss: Its loss.
        rewards: Rewards of the chosen and of the rejected answer.
        logprobs: Their log-probabilities in nats.
        tokens: Their numbers of tokens.
    """

    image_id: str
    prompt: str
    chosen: str
    rejected: str
    loss: float
    rewards: Sequence[float]
    logprobs: Sequence[float]
    tokens: Sequence[int]

    @property
    def is_right(self) -> bool:
        """Whether the chosen answer has the higher reward."""
        return self.rewards[0] > self.rewards[1]


class PreferenceMetric(RecordMetric):
    """The share of pairs whose chosen answer has the higher reward, and mean rewards.

    Args:
        cross_entropy: Weight of the cross-entropy of chosen answers in the loss.
    Attributes:
        pairs: The pairs of the last `compute` by name, with their own images.
        controls: The same with other images, by control.
    """

    pairs: dict[str, ScoredPair]
    controls: dict[str, dict[str, ScoredPair]]

    def __init__(self, *, cross_entropy: float = 0.0) -> None:
        super().__init__()
        self.cross_entropy = cross_entropy

    def update(self, names: Sequence[str], pairs: Sequence[ScoredPair], column: str = "") -> None:
        """Adds pairs.

        Args:
            column: One of ``CONTROLS``, or "" for pairs with their own images.
        """
        self.add((f"{name}@{column}", name, column, *pair) for name, pair in zip(names, pairs, strict=True))

    def compute(self) -> dict[str, float]:
        """Returns accuracy, accuracy_logprob, reward_chosen, reward_rejected and margin.

        Raises:
            UserError: Nothing was added.
        """
        self._start_results()
        for name, column, *values in self.rows().values():
            (self.controls[column] if column else self.pairs)[name] = ScoredPair(*values)
        if not self.pairs:
            raise UserError("no pair of answers to score: no sample could be read, or the split is empty", status=1)
        scored = list(self.pairs.values())
        chosen, rejected = (float(np.mean([pair.rewards[at] for pair in scored])) for at in (0, 1))
        return {
            "accuracy": self._accuracy(scored),
            "accuracy_logprob": float(np.mean([pair.logprobs[0] > pair.logprobs[1] for pair in scored])),
            "reward_chosen": chosen,
            "reward_rejected": rejected,
            "margin": chosen - rejected,
        }

    def compute_controls(self, loss: float) -> dict[str, float]:
        """Returns metric@shuffled and metric@blank of pairs with images, and accuracy@length.

        The last control prefers either always the longer answer or always the shorter one, whichever is right more
        often. The loss of a control is the split's loss plus the increase on the pairs that have the control.

        Args:
            loss: Loss of the split.
        """
        results = {"accuracy@length": float(np.mean(list(self._length_control().values())))}
        for name, pairs in self.controls.items():
            if common := sorted(pairs.keys() & self.pairs.keys()):
                control, own = ([side[name] for name in common] for side in (pairs, self.pairs))
                added = self._loss(control) - self._loss(own)
                results |= {f"accuracy@{name}": self._accuracy(list(pairs.values())), f"loss@{name}": loss + added}
        return results

    def _loss(self, pairs: Sequence[ScoredPair]) -> float:
        mean = float(np.mean([pair.loss for pair in pairs]))
        tokens = sum(pair.tokens[0] for pair in pairs)
        return mean - self.cross_entropy * sum(pair.logprobs[0] for pair in pairs) / tokens

    def scorers(self, control: str) -> tuple[Scorer, Scorer, int]:
        """Returns the scorers of the accuracy of the model and of a control, and the number of records.

        They cover the pairs that have the control.
        """
        if control == "length":
            right = self._length_control()
        else:
            right = {name: float(pair.is_right) for name, pair in self.controls[control].items() if name in self.pairs}
        model = {name: float(self.pairs[name].is_right) for name in right}
        counts = [self._count(side) for side in (model, right)]
        return ratio_scorer(counts[0]), ratio_scorer(counts[1]), len(counts[0])

    def intervals(self, *, seed: int) -> dict[str, float]:
        """Returns accuracy@low and accuracy@high: a 95% interval by bootstrap over records."""
        counts = self._count({name: float(pair.is_right) for name, pair in self.pairs.items()})
        return intervals(["accuracy"], ratio_scorer(counts), len(counts), seed=seed)

    def _count(self, right: Mapping[str, float]) -> Floats:
        """Sums of right pairs and numbers of pairs of each record. Shapes: -> (N, 2)"""
        places = {id: place for place, id in enumerate(dict.fromkeys(self.pairs[name].image_id for name in right))}
        counts = np.zeros((len(places), 2))
        for name, value in right.items():
            counts[places[self.pairs[name].image_id]] += (value, 1)
        return counts

    def _length_control(self) -> dict[str, float]:
        """1 for each pair that a rule about length decides rightly, 0.5 if both answers are equally long."""
        longer = {name: 0.5 + 0.5 * np.sign(pair.tokens[0] - pair.tokens[1]) for name, pair in self.pairs.items()}
        prefers_longer = 2 * sum(longer.values()) >= len(longer)
        return {name: float(value if prefers_longer else 1 - value) for name, value in longer.items()}

    @staticmethod
    def _accuracy(pairs: Sequence[ScoredPair]) -> float:
        return float(np.mean([pair.is_right for pair in pairs]))

    def _start(self) -> None:
        super()._start()
        self._start_results()

    def _start_results(self) -> None:
        self.pairs, self.controls = {}, {name: {} for name in CONTROLS}
