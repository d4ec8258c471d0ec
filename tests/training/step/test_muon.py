"""Muon: orthogonal updates for matrices, torch's AdamW for all else."""

from functools import partial

import pytest
import torch
from torch import nn

from vlm.nn.device import has_bfloat16
from vlm.training.step.optim import Constant, Muon, Optimization, orthogonalize, parameter_groups


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (32, 48)])
def test_orthogonalized_is_near_the_polar_factor(shape, dtype):
    """Also where its products are in sixteen bits."""
    matrices = torch.randn(3, *shape)
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = orthogonalize(matrices, 5, dtype)
    assert found.dtype == torch.float32
    torch.testing.assert_close(torch.linalg.svdvals(found), torch.ones_like(s), rtol=0, atol=0.4)
    cosine = (found * (u @ v)).sum((1, 2)) / found.norm(dim=(1, 2)) / (u @ v).norm(dim=(1, 2))
    assert cosine.min() > 0.95


def iterate_quintic(matrix, iterations):
    """Jordan et al. (2024), in float64 and by singular values: (rows, columns) -> the same."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return u @ values.diag() @ v


@pytest.mark.parametrize(("last", "bound"), [(None, 2e-3), (torch.bfloat16, 0.03)], ids=["float32", "last bfloat16"])
@pytest.mark.parametrize("rank", [3, 96])
@pytest.mark.parametrize("shape", [(96, 384), (384, 96), (96, 96), (1, 40)], ids=str)
@pytest.mark.parametrize("iterations", [1, 5])
def test_the_quintic_is_iterated_as_published(shape, rank, last, bound, iterations):
    """Through Gram matrices and directly; gradients of low rank, whose zeros are amplified most, too."""
    count = min(*shape, rank)
    values = torch.logspace(0, -3, count)
    matrix = torch.randn(shape[0], count) @ values.diag() @ torch.randn(count, shape[1])
    expected = iterate_quintic(matrix, iterations)
    found = orthogonalize(matrix[None], iterations, None, last)[0]
    assert (found - expected).norm() < bound * expected.norm()


def test_products_of_reduced_precision_avoid_gram_matrices(monkeypatch):
    """TF32 would round them to 10 bits, and the iterations would amplify that."""
    matrix = torch.randn(1, 32, 128)
    found = orthogonalize(matrix, 5)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    direct, x = orthogonalize(matrix, 5), matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    torch.testing.assert_close(direct, x, rtol=0, atol=1e-6)
    assert not torch.equal(direct, found)


@pytest.mark.parametrize(("bfloat16", "fast"), [(False, False), (False, True), (True, False), (True, True)])
def test_products_are_in_sixteen_bits_where_that_is_asked_for_and_faster(bfloat16, fast, monkeypatch):
    monkeypatch.setattr("vlm.training.step.optim.has_bfloat16", lambda device: fast)
    layer = nn.Linear(8, 6, bias=False)
    muon = partial(Muon, lr=0.01, bfloat16=bfloat16)
    optimizer = Optimization(muon, Constant(), weight_decay=0.0).create_optimizer(layer)
    before, layer.weight.grad = layer.weight.detach().clone(), torch.randn(6, 8)
    optimizer.step()
    nesterov = layer.weight.grad * (0.05 + 0.95 * 0.05)
    low = torch.bfloat16 if fast else None
    update = orthogonalize(nesterov[None], 5, low if bfloat16 else None, low)[0]
    torch.testing.assert_close(layer.weight.detach(), before - 0.01 * 0.2 * 8**0.5 * update, rtol=0, atol=1e-6)


def test_a_matrix_moves_by_the_orthogonal_nesterov_momentum():
    layer = nn.Linear(5, 3, bias=False)
    optimizer = Muon(parameter_groups(layer, 0.1), lr=0.01, weight_decay=0.1, momentum=0.9)
    momentum = torch.zeros(3, 5)
    for _ in range(3):
        before, layer.weight.grad = layer.weight.detach().clone(), torch.randn(3, 5)
        momentum = 0.9 * momentum + 0.1 * layer.weight.grad
        low = torch.bfloat16 if has_bfloat16("cpu") else None
        update = orthogonalize((0.1 * layer.weight.grad + 0.9 * momentum)[None], 5, last=low)[0]
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
