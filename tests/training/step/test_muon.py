"""Muon: orthogonal updates for matrices, torch's AdamW for all else."""

from functools import partial

import pytest
import torch
from torch import nn

from vlm.training.step.optim import POLYNOMIALS, Constant, Muon, Optimization, orthogonalize, parameter_groups


def with_singular_values(shape, values):
    """A random matrix with these singular values, and the nearest matrix with orthonormal rows or columns."""
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    return u * values @ v, u @ v


@pytest.mark.parametrize("last", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (32, 48), (200, 30)], ids=str)
def test_orthogonalized_is_near_the_polar_factor(shape, last):
    """Where singular values are at least 0.005 of their norm of order 8, which is at most twice the largest here."""
    pairs = [with_singular_values(shape, torch.linspace(1, 0.01, min(shape)) ** power) for power in (0, 0.5, 1)]
    stack, polar = (torch.stack(side) for side in zip(*pairs, strict=True))
    found = orthogonalize(1e-6 * stack, last)
    assert found.dtype == torch.float32
    assert torch.linalg.matrix_norm(found - polar, 2).max() < (0.02 if last is None else 0.15)


@pytest.mark.parametrize("last", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [0, 1, 5])
def test_gradients_of_low_rank_do_not_diverge(rank, last):
    """Each direction ends at 1; rounding adds no other one of that size."""
    values = (torch.arange(40) < rank).float()
    matrix, _ = with_singular_values((40, 90), values)
    found = torch.linalg.svdvals(orthogonalize(matrix[None], last)[0])
    torch.testing.assert_close(found, values, rtol=0, atol=0.02)


def test_small_singular_values_grow_as_by_the_polynomials():
    """By their definition, in double precision, on a matrix whose singular values fall to a millionth."""
    values = torch.logspace(0, -6, 50)
    matrix, _ = with_singular_values((50, 80), values)
    expected = values.double() / (values.double() ** 8).sum() ** (1 / 8)
    for a, b, c in POLYNOMIALS:
        expected = a * expected + b * expected**3 + c * expected**5
    found = orthogonalize(matrix[None])[0]
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    torch.testing.assert_close((u.mT @ found.double() @ v.mT).diagonal(), expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("place", range(len(POLYNOMIALS)))
def test_each_polynomial_is_the_best_for_its_interval(place):
    """|p(x) - 1| has equal maxima of alternating sign at four points, so that no odd quintic is nearer to 1."""
    low, high = 0.005, 1.0
    for a, b, c in POLYNOMIALS[: place + 1]:
        x = torch.linspace(low, 1.02 * high, 200_001, dtype=torch.float64)
        error = a * x + b * x**3 + c * x**5 - 1
        low, high = 1 + error.min().item(), 1 + error.max().item()
    turns = error[1:-1][(error.diff()[1:] * error.diff()[:-1]) < 0]
    extremes = torch.stack([error[0], *turns, error[-1]])
    assert len(extremes) == 4
    torch.testing.assert_close(extremes, error[0] * torch.tensor([1.0, -1, 1, -1]).double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("bfloat16", "fast"), [(False, True), (True, False), (True, True)])
def test_last_products_are_in_sixteen_bits_where_that_is_asked_for_and_faster(bfloat16, fast, monkeypatch):
    monkeypatch.setattr("vlm.training.step.optim.has_bfloat16", lambda device: fast)
    layer = nn.Linear(8, 6, bias=False)
    muon = partial(Muon, lr=0.01, bfloat16=bfloat16)
    optimizer = Optimization(muon, Constant(), weight_decay=0.0).create_optimizer(layer)
    before, layer.weight.grad = layer.weight.detach().clone(), torch.randn(6, 8)
    optimizer.step()
    nesterov = layer.weight.grad * (0.05 + 0.95 * 0.05)
    exact, rounded = (orthogonalize(nesterov[None], last)[0] for last in (None, torch.bfloat16))
    assert not torch.equal(exact, rounded)
    update = rounded if bfloat16 and fast else exact
    torch.testing.assert_close(layer.weight.detach(), before - 0.01 * 0.2 * 8**0.5 * update, rtol=0, atol=1e-6)


def test_a_matrix_moves_by_the_orthogonal_nesterov_momentum():
    layer = nn.Linear(5, 3, bias=False)
    optimizer = Muon(parameter_groups(layer, 0.1), lr=0.01, bfloat16=False, weight_decay=0.1, momentum=0.9)
    momentum = torch.zeros(3, 5)
    for _ in range(3):
        before, layer.weight.grad = layer.weight.detach().clone(), torch.randn(3, 5)
        momentum = 0.9 * momentum + 0.1 * layer.weight.grad
        update = orthogonalize((0.1 * layer.weight.grad + 0.9 * momentum)[None])[0]
        optimizer.step()
        expected = before * (1 - 0.01 * 0.1) - 0.01 * 0.2 * 5**0.5 * update
        torch.testing.assert_close(layer.weight.detach(), expected)


def test_all_else_moves_as_with_adamw():
    ours, theirs = nn.Embedding(7, 4), nn.Embedding(7, 4)
    theirs.load_state_dict(ours.state_dict())
    muon = Muon(parameter_groups(ours, 0.1), lr=0.01, betas=(0.8, 0.95))
    adam = torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=(0.8, 0.95), weight_decay=0.0)
    for _ in range(4):
        ours.weight.grad = theirs.weight.grad = torch.randn(7, 4)
        muon.step()
        adam.step()
    torch.testing.assert_close(ours.weight, theirs.weight)


def test_its_state_is_restored_exactly():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Conv2d(3, 2, 2))

    def steps(model, optimizer, count, seed):
        torch.manual_seed(seed)
        for _ in range(count):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()

    whole, parts = build(), build()
    one = Muon(parameter_groups(whole, 0.1), lr=0.01)
    two = Muon(parameter_groups(parts, 0.1), lr=0.01)
    steps(whole, one, 2, 1)
    steps(parts, two, 2, 1)
    again = Muon(parameter_groups(parts, 0.1), lr=0.5)
    again.load_state_dict(two.state_dict())
    steps(whole, one, 2, 2)
    steps(parts, again, 2, 2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parts.parameters(), strict=True))
