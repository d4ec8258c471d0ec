"""Prepares a model for training: adapters, compiled blocks, and activations that the backward pass recomputes."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from vlm.checkpoint.load import ADAPTERS, describe_bases
from vlm.checkpoint.stored import Adapters, Checkpoint
from vlm.config.build import build
from vlm.config.tree import Config
from vlm.errors import UserError, did_you_mean, find_similar
from vlm.nn.attention import recompute_contexts
from vlm.randomness import key
from vlm.training.run.processes import is_rank_zero

Forward: TypeAlias = Callable[..., Any]  # a forward pass, with the block as first argument
Compiler: TypeAlias = Callable[[Forward], Forward]
VARIANTS = 64  # compiled versions of one function; blocks that differ, such as in drop_path, need one each


def missing(*, on_gpu: bool) -> str | None:
    """Returns a requirement of torch.compile that is missing on this machine, or None."""
    if on_gpu and find_spec("triton") is None:
        return "Triton (pip install triton)"
    if on_gpu and torch.cuda.get_device_capability() < (7, 0):
        return "GPU of compute capability 7.0 or more"
    variable, kind = ("CC", "C") if on_gpu else ("CXX", "C++")
    usual = ("gcc", "clang", "cc") if on_gpu else ("clang++" if sys.platform == "darwin" else "g++",)
    names = [os.environ[variable]] if os.environ.get(variable) else usual
    if any(shutil.which(name) for name in names):
        return None
    return f"{kind} compiler (looked for {', '.join(names)}; {variable} names another)"


class _CompileClock:
    """Measures compilations, which may begin in a forward pass or, on another thread, in a backward pass."""

    seconds = 0.0
    _began: float | None = None

    def watch(self) -> None:
        if self._began is None:
            self._began = 0.0
            from torch._dynamo import on_compile_end, on_compile_start  # only here: it takes seconds

            on_compile_start(self._start)
            on_compile_end(self._end)

    def _start(self, *args: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, *args: Any) -> None:
        assert self._began is not None
        self.seconds += time.perf_counter() - self._began


_clock = _CompileClock()


def seconds() -> float:
    """Time that this process has spent compiling so far."""
    return _clock.seconds


def compiler(*, on_gpu: bool) -> Compiler:
    """A compiler of a block's forward pass, with the settings that blocks need; `seconds` has its time so far."""
    from torch._dynamo import config  # only here: it takes seconds

    settings: Any = config
    settings.recompile_limit = VARIANTS
    settings.optimize_ddp = False  # it would split graphs where gradients are sent; blocks are split already
    settings.skip_fsdp_guards = False  # else the code of one sharded block would be reused for different ones
    _clock.watch()
    if on_gpu:
        return torch.compile  # for a fixed size until another one comes
    # The same kernels for all sizes, loop tails included. Kernels for each size would sum in different orders, and a
    # resumed run, which has met other sizes, would arrive at other weights.
    return partial(torch.compile, dynamic=True, options={"cpp.enable_loop_tail_vec": False})


STACKS = ("blocks", "layers", "stages")  # attributes that hold the blocks of a model, by our names and timm's


def iter_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the blocks of a model, outer ones before those inside them."""
    for name, stack in model.named_modules():
        if name.rpartition(".")[2] in STACKS and isinstance(stack, nn.ModuleList | nn.Sequential):
            yield from stack


def arrange(model: nn.Module, *, recompute: bool, compiled: Compiler | None = None) -> None:
    """Sets how training runs each block of a model; before a strategy takes the model.

    Args:
        recompute: Whether to keep only a block's input for the backward pass, which recomputes the rest with the same
            dropout (Chen et al. 2016). Blocks with batch norms are left out: their statistics would be updated twice.
        compiled: Compiles a function; None to run blocks as they are.
    """
    model_blocks = list(iter_blocks(model))
    forwards: dict[Forward, Forward] = {}  # one per class, so that equal blocks share compiled code
    for block in model_blocks:
        if any(inner in model_blocks for inner in block.modules() if inner is not block):
            continue
        if isinstance(block, nn.RNNBase):  # already one kernel, and packed sequences cannot be compiled
            continue
        original = type(block).forward
        if compiled and original not in forwards:
            forwards[original] = compiled(original)
        recomputes = recompute and not any(isinstance(part, _BatchNorm) for part in block.modules())
        if compiled or recomputes:
            block.forward = _BlockForward(block, original, forwards.get(original, original), recomputes)


class _BlockForward:
    """A block's forward pass in training; without gradients, the original forward pass.

    An object instead of a closure, so that a deep copy of a block runs itself and not the original.
    """

    def __init__(self, block: nn.Module, original: Forward, forward: Forward, recompute: bool) -> None:
        self.block, self.original, self.forward, self.recompute = block, original, forward, recompute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(self.block, *args, **kwargs)
        if self.recompute:
            return checkpoint(
                self.forward, self.block, *args, use_reentrant=False, context_fn=recompute_contexts, **kwargs
            )
        return self.forward(self.block, *args, **kwargs)


Adapted = tuple[Adapters, set[str]]  # the entry of checkpoints, and the names of weights that they leave out


def adapt(model: nn.Module, config: Config, places: Mapping[str, str], loaded: Checkpoint | None) -> Adapted | None:
    """Freezes a model's pretrained weights and adds the adapters of model.adapt; weights without a base stay trained.

    Args:
        places: Where the weights come from, by the part of the model.
        loaded: The checkpoint of a resumed run.
    Returns:
        The adapters' entry of checkpoints and the names of weights that these leave out; None without adapters.
    Raises:
        UserError: There is nothing to adapt.
    """
    if (node := config["model"].get("adapt")) is None:
        return None
    lora = build(node, "model.adapt")
    if not places:
        raise UserError("model.adapt needs pretrained weights; set model=pretrained or model.init_from")
    if loaded is None:
        bases, held = describe_bases(model, places)
    else:
        entry = loaded[ADAPTERS]
        bases, held = entry["base"], model.state_dict().keys() - set(entry["fresh"])
    frozen = config["task"].get("freeze") or ()
    modules = {name for name, _ in model.named_modules() if name}
    for name in lora.modules_to_save:
        if name not in modules or any(f"{name}.".startswith(f"{part}.") for part in frozen):
            reason = "is frozen by task.freeze" if name in modules else "is not a module of the model"
            raise UserError(f"model.adapt.modules_to_save: {name} {reason}{did_you_mean(find_similar(name, modules))}")
    saved = tuple(f"{name}." for name in lora.modules_to_save)
    held = {name for name in held if not name.startswith(saved)}
    inside = tuple(f"{part}." for part in frozen)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in held and not name.startswith(inside))
    torch.manual_seed(key(config["seed"], "adapters"))
    count = lora.adapt(model, without=[*frozen, *lora.modules_to_save])
    if count == 0:
        raise UserError(
            f"model.adapt.projections: {', '.join(lora.projections)} matches no linear layer that is not frozen; "
            "layer names look like decoder.blocks.0.attn.qkv"
        )
    if is_rank_zero():
        print(_format_share(model, count, places), flush=True)
    return {"scale": lora.scale, "layers": count, "base": bases}, held


def _format_share(model: nn.Module, count: int, places: Mapping[str, str]) -> str:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    total = sum(size for size, _ in sizes)
    return (
        f"adapters of {count} layers: {trained:,} of {total:,} parameters are trained ({trained / total:.2%}); "
        f"checkpoints leave the others to {', '.join(dict.fromkeys(places.values()))}"
    )
