"""Matches the stacks of a model with the parts of a folder, and reports what differs."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import ProjectedEncoder
from vlm.models.pretrained.folder import QUANTISED_SUFFIXES, Folder
from vlm.models.pretrained.stack import (
    LAYER,
    Part,
    StackModule,
    Weight,
    WeightMap,
    add_prefixes,
    infer_sizes,
    list_patterns,
    map_weights,
)
from vlm.models.vit import ViT
from vlm.nn.position import LearnedPositions, interpolate_grid

SIZES = ("dim", "num_heads", "mlp_ratio")  # set once in the config, under model.size
# Values that the tensors determine, and the image size, to which positions are interpolated.
UNCOMPARED = ("prefix", "vocabulary_head", "context_dim", "image_size")
POSITIONS = "positions.weight"
# Remedies for values that other parts of the config depend on.
REMEDIES = {
    "vocab_size": "choose the tokenizer it was trained with, of {} tokens",
    "max_len": "set data.max_len={} or less",
    "stem": "choose model/encoder=vit",
}


@dataclass(frozen=True)
class MatchedStack:
    """A stack of the model with the part of the folder that describes it.

    Args:
        ours: Prefix of its names in the model, such as "", "encoder." or "decoder.".
    """

    module: StackModule
    ours: str
    part: Part

    def compare_sizes(self, folder: Folder, stacks: list["MatchedStack"]) -> Iterator[str]:
        """Yields a line with a remedy for each size in which model and folder differ."""
        first = stacks[0].part.stack.read_arguments(stacks[0].part.config)
        built: Mapping[str, Any] = {**infer_sizes(self.module)}
        for name, value in self.part.stack.read_arguments(self.part.config).items():
            # A model for shorter texts needs only the first positions, and a model may leave out the final norm.
            fits = built[name] <= value if name == "max_len" else name in UNCOMPARED or built.get(name, value) == value
            fits = fits or (name == "final_norm" and not built[name])
            if not fits:
                remedy = _suggest_remedy(self, name, value, encoder=first.get(name), single=len(stacks) == 1)
                theirs = f"{folder} has {_format_value(value)}"
                yield f"{self.ours}{name} is {_format_value(built[name])}, {theirs}; {remedy}"

    def report_resizing(self, weights: WeightMap, stored: Mapping[str, Tensor], folder: Folder) -> Iterator[str]:
        """Yields a line if positions were interpolated or truncated."""
        name, sizes = f"{self.ours}{POSITIONS}", infer_sizes(self.module)
        if isinstance(self.module, ViT):
            theirs = self.part.stack.read_arguments(self.part.config)["image_size"]
            if (ours := sizes.get("image_size")) != theirs:
                yield f"{name}: interpolated from images of {theirs} to {ours} pixels"
            return
        source = weights[name].names[0] if name in weights else ""
        if sizes.get("positions") == "learned" and source in stored and len(stored[source]) > sizes["max_len"]:
            yield f"{folder}: unused: rows {sizes['max_len']} to {len(stored[source]) - 1} of {source}"

    def map_weights(self, stored: Iterable[str], *, complete: bool) -> WeightMap:
        """Maps the tensors of the stack and its vocabulary head: all, or without `complete` those that are stored."""
        stack, config, prefix = self.part
        names, theirs = _strip_part_prefix(self.part, stored)
        of_stack = {name.removeprefix(theirs) for name in names if name.startswith(theirs)}
        weights = stack.map_weights(self.module, of_stack)
        if POSITIONS in weights:
            weights[POSITIONS] = _resize_positions(
                self.module, weights[POSITIONS], stack.read_arguments(config).get("image_size")
            )
        head = map_weights(stack.head, self.module.state_dict(), names)
        head = head if complete else select_complete(head, names)
        if "vocabulary_head.own.weight" in head:  # then the head is not tied to the embedding
            head.pop("token_embed.weight", None)
        return add_prefixes(weights, self.ours, prefix + theirs) | add_prefixes(head, self.ours, prefix)

    def omits(self, name: str) -> bool:
        """Returns True for the final norm, by our name, if an image encoder is built without it."""
        return name == "norm" and isinstance(self.module, ViT) and isinstance(self.module.norm, nn.Identity)

    def find_foreign_modules(self, stored: Iterable[str], folder: Folder) -> Iterator[str]:
        """Yields a line for each of their modules that our model lacks."""
        held, theirs = _strip_part_prefix(self.part, stored)
        state = {LAYER.sub(".*.", name, count=1) for name in self.module.state_dict()}
        modules = {name.rpartition(".")[0] for name in state}
        for name, entry in self.part.stack.names.items():
            paths = entry.names if isinstance(entry, Weight) else (entry,) if isinstance(entry, str) else entry
            first = f"{theirs}{paths[0]}".replace("*", "0").replace(".{kind}", "")
            if (
                name not in state | modules
                and not self.omits(name)
                and (foreign := [path for path in held if path.startswith(first)])
            ):
                yield f"the model has no {self.ours}{name}, {folder} has {min(foreign)}; choose model=pretrained"


def match_stacks(model: nn.Module, folder: Folder) -> list[MatchedStack]:
    """Returns the stacks of the model that the folder describes.

    Raises:
        UserError: The model has no such stack.
    """
    # An image encoder may be taken from a folder that also has a text encoder.
    parts = {place: part for place, part in folder.parts.items() if place != "text_encoder" or hasattr(model, place)}
    if len(parts) > 1 and not all(hasattr(model, place) for place in parts):
        raise UserError(
            f"{folder} holds an encoder with a decoder, the model is a {type(model).__name__}; use it for a model that "
            "has both"
        )
    return [_match_stack(model, place, part, folder) for place, part in parts.items()]


def _match_stack(model: nn.Module, place: str, part: Part, folder: Folder) -> MatchedStack:
    kind = part.stack.kind
    module, ours = (model, "") if isinstance(model, kind) else (getattr(model, place, None), f"{place}.")
    if isinstance(module, ProjectedEncoder):
        module, ours = module.backbone, f"{ours}backbone."
    if not isinstance(module, kind):
        has = f"its {place} is a {type(module).__name__}" if module is not None else f"that has no {place}"
        raise UserError(
            f"{folder} holds a {part.stack.model_type} for a {kind.__name__}, the model is a {type(model).__name__}, "
            f"{has}; choose another folder"
        )
    return MatchedStack(module, ours, part)


def find_unknown_tensors(
    stacks: Iterable[MatchedStack], weights: WeightMap, stored: Mapping[str, Tensor], folder: Folder
) -> Iterator[str]:
    """Yields a line for each tensor that no table of the architecture names."""
    unused = stored.keys() - {name for weight in weights.values() for name in weight.all_names}
    patterns = [*folder.architecture.unused]
    for part in folder.parts.values():
        _, theirs = _strip_part_prefix(part, stored)
        # A model may have an image encoder, but no text encoder.
        matched = next((stack for stack in stacks if stack.part is part), None)
        names = part.stack.names
        unmatched = list_patterns(
            names if matched is None else {name: names[name] for name in names if matched.omits(name)}
        )
        patterns += (f"{part.prefix}{theirs}{name}" for name in (*part.stack.list_unused(part.config), *unmatched))
    escaped = (re.escape(name).replace(r"\*", r"\d+").replace(r"\{kind\}", "(?:weight|bias)") for name in patterns)
    allowed = re.compile("|".join(escaped), re.ASCII)
    kind = folder.config.values.get("model_type", folder.origin)
    for name in sorted(unused):
        if not allowed.fullmatch(name):
            reason = "belongs to an unsupported quantisation"
            reason = reason if name.rpartition(".")[2] in QUANTISED_SUFFIXES else f"is not a known tensor of {kind}"
            yield f"{name} in {folder} {reason}; choose another folder"


def select_complete(weights: WeightMap, stored: Collection[str]) -> WeightMap:
    """Returns the weights whose stored tensors are all there."""
    return {
        name: weight for name, weight in weights.items() if all(stored_name in stored for stored_name in weight.names)
    }


def _strip_part_prefix(part: Part, stored: Iterable[str]) -> tuple[set[str], str]:
    """Returns names without the part's prefix, and the stack's prefix if the folder was saved with a head."""
    names = {name.removeprefix(part.prefix) for name in stored if name.startswith(part.prefix)}
    return names, part.stack.prefix if any(name.startswith(part.stack.prefix) for name in names) else ""


def _resize_positions(module: nn.Module, weight: Weight, image_size: Any) -> Weight:
    """Adapts positions: a ViT's are interpolated to its grid, learned positions of texts are truncated to max_len.

    Args:
        image_size: Size of the images that the folder's ViT is for.
    """

    def read(*tables: Tensor) -> Tensor:
        rows = weight.read(*tables)
        if isinstance(module, ViT):
            return interpolate_grid(rows, module.grid, before=module.leading, image_size=image_size)
        return rows[: module.max_len] if isinstance(module.positions, LearnedPositions) else rows

    return weight._replace(read=read)


def _suggest_remedy(stack: MatchedStack, name: str, value: Any, *, encoder: Any, single: bool) -> str:
    """Returns the change to the config that fixes a mismatch.

    Args:
        encoder: The encoder's value if the folder has an encoder; model.size has the decoder's if the two differ.
        single: Whether the folder has only one stack.
    """
    if name in REMEDIES:
        return REMEDIES[name].format(_format_value(value))
    if name == "positions":
        decodes = isinstance(stack.module, Decoder)
        return "choose model/position=learned" if decodes else f"remove model.{stack.ours}positions"
    if name == "depth":
        return f"set model.size.{stack.ours.replace('.', '_')}depth={_format_value(value)}"
    if name not in SIZES:
        return f"set model.{stack.ours}{name}={_format_value(value)}"
    if stack.ours == "encoder." and not single:
        return f"set model.encoder.{name}={_format_value(value)}"
    separate = f" and model.encoder.{name}={_format_value(encoder)}" if encoder != value else ""
    return f"set model.size.{name}={_format_value(value)}{separate}"


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):  # the specification of a part
        return f"{value['name']}({', '.join(f'{name}={argument}' for name, argument in value['args'].items())})"
    return value if isinstance(value, str) else json.dumps(value)
