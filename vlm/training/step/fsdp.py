"""Sharding: each rank keeps a part of every weight, gradient and moment; checkpoints hold full tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from vlm.errors import UserError
from vlm.nn.blocks import DecoderBlock
from vlm.training.step.blocks import iter_blocks
from vlm.training.step.lightning_private import shard_over_all_ranks


class ShardedStrategy(ModelParallelStrategy):
    """Fully sharded data parallelism (FSDP2; Zhao et al. 2023): all ranks together hold one model and optimiser.

    Lightning's strategy bypasses the trainer's CheckpointIO and reads checkpoints unsafely. This one uses it, in
    the format that a single process writes, so that each can resume a run of the other.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        shard_over_all_ranks(self, self.num_nodes * self.num_processes)
        super().setup_environment()

    lightning_restore_optimizer = True  # by load_optimizer_state_dict

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        gathered = full_state_dict(checkpoint)  # by all ranks together
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(gathered, filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_full_weights(self.lightning_module, checkpoint["state_dict"])

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, stored in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            params = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                index: {name: shard_like(value, params[index]) for name, value in values.items()}
                for index, values in stored["state"].items()
            }
            optimizer.load_state_dict({**stored, "state": state})


def shard(model: nn.Module, strategy: Strategy) -> None:
    """Shards a model over the ranks of a sharding strategy: each block as a unit, all other weights as another.

    Raises:
        UserError: The model has recurrent layers, whose kernels keep references to full weights.
    """
    if not isinstance(strategy, ShardedStrategy) or isinstance(model, FSDPModule):
        return
    if any(isinstance(part, nn.RNNBase) for part in model.modules()):
        raise UserError("trainer=fsdp: cannot shard recurrent layers; use trainer=ddp")
    mesh = strategy.device_mesh["data_parallel"]
    for block in iter_blocks(model):
        fully_shard(block, mesh=mesh)
        if isinstance(block, DecoderBlock):  # its keys_values are called by the decoder ahead of the block itself
            register_fsdp_forward_method(block, "keys_values")
    fully_shard(model, mesh=mesh)


def gather(model: nn.Module) -> None:
    """Gathers the full weights on each rank, for an evaluation.

    Ranks have different numbers of batches and of tokens to decode, and so cannot gather weights block by block
    together.
    """
    _set_sharding(model, gathered=True)


def scatter(model: nn.Module) -> None:
    """Shards the weights again after `gather`."""
    _set_sharding(model, gathered=False)


def _set_sharding(model: nn.Module, *, gathered: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            if module is not model:  # the outermost keeps its weights gathered from forward to backward anyway
                module.set_reshard_after_forward(not gathered, recurse=False)
            module.unshard() if gathered else module.reshard()


def full_state_dict(value: Any) -> Any:
    """Gathers all sharded tensors of a container on the CPU; a collective operation."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {name: full_state_dict(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(full_state_dict(child) for child in value)
    return value


def to_local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Any, reference: Any) -> Any:
    """Shards a full tensor like a reference of the same shape; returns anything else unchanged."""
    if isinstance(reference, DTensor) and isinstance(value, Tensor) and value.shape == reference.shape:
        if isinstance(value, DTensor):
            return value
        # Every rank has read the full tensor from the same file: nothing is sent.
        on_device = value.to(reference.device_mesh.device_type)
        return distribute_tensor(on_device, reference.device_mesh, reference.placements, src_data_rank=None)
    return value


def load_full_weights(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads full weights into a module that may be sharded."""
    expected = module.state_dict()
    with torch.no_grad():
        module.load_state_dict({name: shard_like(value, expected.get(name)) for name, value in state.items()})
