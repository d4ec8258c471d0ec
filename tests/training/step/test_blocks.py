"""Blocks that training compiles, or computes anew in the backward pass, are what they were."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch._inductor import config as inductor

from vlm.data.batch import Targets, next_token_labels
from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.position import RotaryPositions
from vlm.randomness import seed_torch
from vlm.training.run.build import should_compile
from vlm.training.run.fit import main
from vlm.training.step import blocks as compiling
from vlm.training.step.blocks import arrange, iter_blocks
from vlm.training.step.losses import token_loss


def captioner(*, dropout: float = 0.2) -> VisionLanguageModel:
    torch.manual_seed(0)
    shape: dict = {"dim": 32, "depth": 2, "num_heads": 2, "dropout": dropout}
    encoder = ViT(image_size=32, patch_size=8, drop_path=dropout, **shape)
    positions = RotaryPositions(head_dim=16)
    more: dict = {"vocab_size": 50, "max_len": 16, "context_dim": 32, "num_kv_heads": 1, "positions": positions}
    return VisionLanguageModel(encoder=encoder, decoder=Decoder(**more, **shape))


def step(model: VisionLanguageModel, *, rows: int = 3, length: int = 12) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of a batch that its sizes decide, dropout too."""
    drawn = torch.Generator().manual_seed(length)
    images, tokens = torch.randn(rows, 3, 32, 32, generator=drawn), torch.randint(50, (rows, length), generator=drawn)
    segments = torch.arange(length).div(5, rounding_mode="floor").add(1).expand(rows, -1)
    model.zero_grad()
    seed_torch(7 * length + rows)
    hidden = model(images, tokens, segments)
    loss, _ = token_loss(hidden, Targets.from_labels(next_token_labels(tokens, segments)), model.head_parts)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def is_same(one: tuple[Tensor, dict[str, Tensor]], other: tuple[Tensor, dict[str, Tensor]]) -> bool:
    assert one[1].keys() == other[1].keys() and one[1]
    return torch.equal(one[0], other[0]) and all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def count_kept_bytes(model: VisionLanguageModel) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    found = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.setdefault(t.data_ptr(), t), lambda t: t):
        model(torch.randn(3, 3, 32, 32), torch.randint(50, (3, 12)))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(t.nbytes for place, t in found.items() if place not in own)


def test_recomputed_activations_are_those_that_were_not_kept() -> None:
    model, reference = captioner(), captioner()
    arrange(model, recompute=True)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert is_same(step(model), step(reference))  # with dropout, which another mask would change
    assert not is_same(step(reference, length=11), step(reference))
    assert count_kept_bytes(model) < 0.5 * count_kept_bytes(reference)
    with torch.no_grad():
        images, tokens = torch.randn(2, 3, 32, 32), torch.randint(50, (2, 6))
        assert torch.equal(model.eval()(images, tokens), reference.eval()(images, tokens))


def test_a_copy_runs_its_own_weights() -> None:
    model = captioner(dropout=0.0)
    arrange(model, recompute=True)
    other = copy.deepcopy(model)
    nn.init.zeros_(other.decoder.blocks[0].mlp.fc2.weight)
    assert not torch.equal(step(other)[0], step(model)[0])
    assert torch.equal(step(captioner(dropout=0.0))[0], step(model)[0])


def test_stacks_in_stacks_and_batch_norms() -> None:
    """Of a backbone in stages, the innermost blocks are taken; batch norms see each batch once."""
    staged = TimmEncoder(name="convnext_atto", dim=8, image_size=32)
    arrange(staged, recompute=True)
    taken = [block for block in iter_blocks(staged) if "forward" in vars(block)]
    assert len(taken) == 12 and {type(block).__name__ for block in taken} == {"ConvNeXtBlock"}
    normed = TimmEncoder(name="test_byobnet", dim=8, image_size=32)
    arrange(normed, recompute=True)
    assert not any("forward" in vars(block) for block in iter_blocks(normed))


def test_what_is_missing_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CXX", "nonesuch")
    assert main(["debug=fast", "trainer=cpu", "compile=true", f"runs={tmp_path}"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "compile: C++ compiler" in said and "nonesuch" in said and "compile=false" in said
    assert not list(tmp_path.iterdir())  # before any data is read


def test_a_gpu_compiles_by_default_where_it_can(monkeypatch, capsys) -> None:
    cpu, gpu = ({"trainer": {"accelerator": kind}} for kind in ("cpu", "auto"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(compiling, "missing", lambda on_gpu: None)
    assert should_compile({**gpu, "compile": None}) and should_compile({**cpu, "compile": True})
    assert not should_compile({**gpu, "compile": False}) and not should_compile({**cpu, "compile": None})
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(compiling, "missing", lambda on_gpu: "Triton")
    assert not should_compile({**gpu, "compile": None}) and "Triton is missing" in capsys.readouterr().out
    with pytest.raises(UserError, match="compile: Triton is missing; install it, or set compile=false"):
        should_compile({**gpu, "compile": True})


needs_compiler = pytest.mark.skipif(compiling.missing(on_gpu=False) is not None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.slow
def test_compiled_blocks_are_the_same_function() -> None:
    model, reference = captioner(dropout=0.0), captioner(dropout=0.0)
    arrange(model, recompute=False, compiled=compiling.compiler(on_gpu=False))
    assert list(model.state_dict()) == list(reference.state_dict())
    spent = [compiling.seconds()]
    for length in (12, 9, 15):
        for mine, true in zip(step(model, length=length), step(reference, length=length), strict=True):
            torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)
        spent.append(compiling.seconds())
    assert spent[0] < spent[1] == spent[3]  # other lengths need no other code
    assert not torch._dynamo.utils.counters["graph_break"]


@needs_compiler
@pytest.mark.nightly
def test_compiled_dropout_is_keyed_whatever_was_compiled_for() -> None:
    """A resumed run compiles for the batch that it comes to first: it must not be told from one that went through."""

    def steps(*lengths: int, recompute: bool) -> dict[int, tuple[Tensor, dict[str, Tensor]]]:
        torch.compiler.reset()
        model = captioner()
        arrange(model, recompute=recompute, compiled=compiling.compiler(on_gpu=False))
        return {length: step(model, length=length) for length in lengths}

    # Code that was made for other lengths and lies in a cache would prove nothing.
    with inductor.patch(fx_graph_cache=False), functorch.patch(enable_autograd_cache=False):
        one = steps(12, 9, 15, recompute=False)
        other = steps(15, 9, 12, recompute=True)  # recomputing draws the same masks once more
    assert all(is_same(other[length], one[length]) for length in one)
