"""Losses of pairs of answers, from numbers."""

import math

import pytest
import torch

from vlm.tasks.preferences.objectives import DPO, IPO, PairScores, SimPO, margins


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


LOGPROBS, COUNTS, REFERENCE = (-6.0, -9.0), (3.0, 4.0), (-7.0, -8.5)
SCORES = PairScores(*(torch.tensor([pair]) for pair in (LOGPROBS, COUNTS, REFERENCE)))


@pytest.mark.parametrize(
    ("objective", "loss", "rewards"),
    [
        (DPO(0.5), -math.log(sigmoid(0.5 * 1.5)), (0.5, -0.25)),
        (DPO(0.5, 0.1), -0.9 * math.log(sigmoid(0.75)) - 0.1 * math.log(sigmoid(-0.75)), (0.5, -0.25)),
        (IPO(0.5), (1 / 3 + 0.5 / 4 - 1) ** 2, (0.5, -0.25)),
        (SimPO(2.0, 0.5), -math.log(sigmoid(-4 + 4.5 - 0.5)), (-4, -4.5)),
        (SimPO(2.0, 1.0, 0.2), -0.8 * math.log(sigmoid(-0.5)) - 0.2 * math.log(sigmoid(0.5)), (-4, -4.5)),
    ],
    ids=str,
)
def test_the_loss_and_the_rewards_are_those_of_the_equations(objective, loss, rewards) -> None:
    assert objective.losses(SCORES).tolist() == pytest.approx([loss])
    assert objective.rewards(SCORES)[0].tolist() == pytest.approx(rewards)
    assert margins(objective.rewards(SCORES)).tolist() == pytest.approx([rewards[0] - rewards[1]])
