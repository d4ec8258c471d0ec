"""The divergence of a student from a teacher, beside TRL and by hand."""

import json
import math
from pathlib import Path
from typing import Any

import distillation_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.nn import vocabulary_loss as vocabulary
from vlm.nn.distillation_loss import (
    TeacherStates,
    TopPredictions,
    consistency_loss,
    divergence,
    predict,
    select_top,
    soften,
    vocabulary_divergence,
)

FIXTURE = json.loads((Path(__file__).parents[1] / "checkpoint" / "files" / "trl_distillation.json").read_text())


@pytest.mark.parametrize("case", cases.CASES)
def test_divergence_and_gradients_are_those_of_trl(case: str) -> None:
    """The fixture is what benchmarks/references/trl.sh wrote with GKDTrainer.generalized_jsd_loss of TRL 1.16.0."""
    ours, theirs = cases.compute(**cases.CASES[case]), FIXTURE[case]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, values in theirs["gradients"].items():
        assert max(map(abs, values)) > 1e-3, name
        assert ours["gradients"][name] == pytest.approx(values, abs=1e-6), name


def kl_by_hand(teacher: list[float], student: list[float]) -> float:
    return sum(p * math.log(p / q) for p, q in zip(teacher, student, strict=True))


def softmax_by_hand(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(value / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_forward_and_reverse_divergence_by_hand(temperature: float) -> None:
    student, teacher = [0.5, -1.0, 2.0, 0.0], [3.0, 0.2, -0.7, 1.1]
    given = soften(torch.tensor([teacher]), temperature)
    p, q = softmax_by_hand(teacher, temperature), softmax_by_hand(student, temperature)
    for beta, truth in ((0.0, kl_by_hand(p, q)), (1.0, kl_by_hand(q, p))):
        found = divergence(torch.tensor([student]), given, temperature=temperature, beta=beta)
        assert found.item() == pytest.approx(truth, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_outcomes_beyond_the_likeliest_are_one_outcome(beta: float) -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 5, 7, dtype=torch.float64) * 3
    logprobs = soften(teacher, 2.0)
    top = select_top(logprobs, 3)
    assert top.outcomes.tolist() == logprobs.topk(3).indices.tolist()
    torch.testing.assert_close(top.logprobs.exp().sum(1), torch.ones(5, dtype=torch.float64))
    merged = []
    for side in (student, teacher):
        probs = (side / 2.0).softmax(-1)
        kept = probs.gather(1, top.outcomes)
        merged.append(torch.cat([kept, 1 - kept.sum(1, keepdim=True)], 1).log())
    truth = divergence(merged[0], merged[1], temperature=1.0, beta=beta)
    found = divergence(student, top, temperature=2.0, beta=beta)
    torch.testing.assert_close(found, truth)
    complete = divergence(student, logprobs, temperature=2.0, beta=beta)
    assert (found < complete).all()  # merging outcomes hides differences
    all_but_one = divergence(student, select_top(logprobs, 6), temperature=2.0, beta=beta)
    torch.testing.assert_close(all_but_one, complete)


@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("tokens", [1, 3])
def test_divergence_and_gradients_by_chunks_are_those_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int | None
) -> None:
    torch.manual_seed(1)
    sizes = {"hidden": (10, 6), "weight": (11, 6), "bias": (11,)}
    student = {name: torch.randn(*size, requires_grad=True) for name, size in sizes.items()}
    teacher = TeacherStates(torch.randn(10, 5), torch.randn(11, 5), torch.randn(11), top_k)

    def compute(given: TeacherStates | Tensor | TopPredictions) -> list[Tensor]:
        loss = vocabulary_divergence(*student.values(), given, temperature=2.0, beta=0.3)
        return [loss.detach(), *torch.autograd.grad(loss, list(student.values()))]

    logits = F.linear(student["hidden"], student["weight"], student["bias"])
    predictions = predict(teacher, 2.0)
    truth = divergence(logits, predictions, temperature=2.0, beta=0.3).sum()
    expected = [truth.detach(), *torch.autograd.grad(truth, list(student.values()))]
    monkeypatch.setattr(vocabulary, "MOST", {"cpu": tokens * 8 * 11})
    for given in (teacher, predictions):
        torch.testing.assert_close(compute(given), expected)


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("biased", [False, True])
def test_consistency_of_two_passes_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, tokens: int, biased: bool
) -> None:
    """Half of both divergences of Kullback and Leibler, beside autograd through one product of all tokens."""
    monkeypatch.setattr(vocabulary, "MOST", {"cpu": 8 * 11 * 3})  # chunks of three tokens
    torch.manual_seed(tokens)
    parts = [torch.randn(n, 6, dtype=torch.float64) for n in (tokens, tokens, 11)]
    parts += [torch.randn(11, dtype=torch.float64)] if biased else []
    theirs = [part.clone().requires_grad_() for part in parts]
    sides = [F.linear(states, *theirs[2:]).log_softmax(-1) for states in theirs[:2]]
    options: dict[str, Any] = {"reduction": "sum", "log_target": True}
    truth = (F.kl_div(*sides, **options) + F.kl_div(*sides[::-1], **options)) / 2
    (truth * 0.3).backward()
    ours = [part.clone().requires_grad_() for part in parts]
    found = consistency_loss(*ours)
    (found * 0.3).backward()
    torch.testing.assert_close(found.double(), truth, rtol=1e-6, atol=0)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert consistency_loss(parts[0], parts[0], *parts[2:]) == 0
