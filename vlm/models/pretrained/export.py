"""Exports our models in Hugging Face's format, with the same tables of names as `load`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.dual_encoder import DualEncoder
from vlm.models.heads import VocabularyHead
from vlm.models.pretrained.architecture import Export, list_model_types, load_architecture
from vlm.models.pretrained.fields import Entry, Fields, Values
from vlm.models.pretrained.stack import Names, Stack, Weight, infer_sizes, map_weights
from vlm.untrusted.sizes import JsonValue

REMEDIES = {"stem": "model/encoder=vit", "positions": "model/position=learned"}


def convert_model(model: nn.Module, origin: str | None = None) -> Export:
    """Converts a model to the content of config.json and tensors.

    Args:
        origin: Class of Hugging Face that the model was imported from, which is preferred to others that compute the
            same.
    Raises:
        UserError: No Hugging Face class computes the same; the message names the key of the config.
    """
    architectures = map(load_architecture, list_model_types())
    for architecture in sorted(architectures, key=lambda architecture: origin not in architecture.models):
        if (exported := architecture.export(model)) is not None:
            return exported
    kind = type(getattr(model, "encoder", model)).__name__
    raise UserError(
        f"model: transformers has no class for this model ({type(model).__name__} of {kind}); use --to safetensors"
    )


def export_stack(
    stack: Stack,
    module: Any,
    key: str = "model.encoder",
    *,
    head: Callable[[VocabularyHead], bool] = lambda head: False,
    more: Values | None = None,
    has_prefix: bool = False,
) -> Export:
    """Converts a stack to config and tensors, without its prefix.

    Args:
        key: The stack's key in our config.
        head: Returns True for a head that theirs supports; by default only the tied embedding.
        has_prefix: Whether the decoder may read states as a part of its text.
        more: Further values for the config.
    Raises:
        UserError: Theirs computes something else; the message names each key with its value.
    """
    sizes = infer_sizes(module) | {"hidden": module.blocks[0].config.hidden}
    config: dict[str, JsonValue] = {"model_type": stack.model_type}
    our_head, prefix = getattr(module, "vocabulary_head", None), getattr(module, "prefix", None)
    unsupported = {
        "prefix": prefix is not None and not has_prefix,
        "vocabulary_head": our_head is not None and not head(our_head),
    }
    faults = [f"{key}.{name} is set" for name, is_set in unsupported.items() if is_set]
    # Always exported: None, which derives them from other sizes in ours, may have another default in theirs.
    exported = sizes | {name: getattr(module.blocks[0].attn, name) for name in ("head_dim", "num_kv_heads")}
    for name, field in stack.sizes.items():
        if isinstance(field, Entry) and name in sizes:
            try:
                config[field.name] = field.write(exported[name])
            except ValueError as fault:
                faults.append(f"{key}.{name} is {sizes.pop(name)}, {fault}")
    config |= {**stack.needed, **stack.exported, **(more or {})}
    for name, value in stack.read_arguments(Fields(config, key)).items():
        if name in sizes and sizes[name] != value and name != "mlp_ratio":
            remedy = f" (train with {REMEDIES[name]} to export it)" if name in REMEDIES else ""
            faults.append(f"{key}.{name} is {sizes[name]}, not {value}{remedy}")
    if faults:
        raise UserError(f"{'; '.join(faults)}; transformers has no class for that: use --to safetensors")
    tensors: dict[str, Tensor] = {}
    for name, weight in stack.map_weights(module).items():
        tensors |= split_weight(weight, module.state_dict()[name], module, name)
    return config, tensors


def split_weight(weight: Weight, tensor: Tensor, module: nn.Module, name: str) -> dict[str, Tensor]:
    """Converts one of our tensors to theirs.

    Args:
        module: The model or stack of ours that has it, which may be on "meta".
        name: Its name there.
    """
    if weight.write is not None:
        tensor = weight.write(tensor)
    if len(weight.names) == 1:
        return {weight.names[0]: tensor}
    layer: Any = module.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
    if not hasattr(layer, "head_dim"):  # the halves of a gated MLP
        return dict(zip(weight.names, tensor.chunk(len(weight.names)), strict=True))
    heads = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads][-len(weight.names) :]
    return dict(zip(weight.names, tensor.split([count * layer.head_dim for count in heads]), strict=True))


def export_classifier(model: Classifier, stack: Stack, *, pool: str, head: Names) -> Export:
    """Converts a classifier to its encoder's config and all tensors.

    Args:
        pool: Pooling of their class.
        head: Names of its head, if our model has that pooling.
    """
    config, tensors = export_stack(stack, model.encoder)
    if model.pool != pool:
        with_token = str(pool == "class").lower()
        raise UserError(
            f"model.pool: {model.pool} with class_token={with_token} has no class in transformers, only class with a "
            "class token and mean without; use --to safetensors"
        )
    state = model.state_dict()
    named = {weight.names[0]: state[name] for name, weight in map_weights(head, state).items()}
    return config, {f"{stack.prefix}{name}": tensor for name, tensor in tensors.items()} | named


def export_towers(
    model: DualEncoder, stacks: Mapping[str, Stack], heads: Names
) -> tuple[dict[str, dict[str, JsonValue]], dict[str, Tensor]]:
    """Converts both encoders to configs, and all tensors.

    Args:
        heads: Names of the tensors outside the encoders.
    """
    config: dict[str, dict[str, JsonValue]] = {}
    tensors: dict[str, Tensor] = {}
    for place, stack in stacks.items():
        part, stack_tensors = export_stack(stack, getattr(model, place), f"model.{place}")
        config["vision_config" if place == "encoder" else "text_config"] = part
        tensors |= {f"{stack.prefix}{name}": tensor for name, tensor in stack_tensors.items()}
    state = model.state_dict()
    for name, weight in map_weights(heads, state).items():
        tensors |= {weight.names[0]: state[name] if weight.write is None else weight.write(state[name])}
    return config, tensors
