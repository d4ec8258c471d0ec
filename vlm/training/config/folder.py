"""Overrides that describe parts of a Hugging Face folder's model in a config: encoder, decoder, prompts and images."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlm.config.target import expand_name
from vlm.errors import UserError
from vlm.nn.image_size import as_override

if TYPE_CHECKING:
    from vlm.checkpoint.stored import Metadata
    from vlm.models.pretrained.folder import FolderSpecification

# AdamW's learning rates: for all weights (Devlin et al. 2019, appendix A.3), for adapters (Hu et al. 2022, table 11),
# and for a pretrained encoder with a new decoder (BLIP, Li et al. 2022).
FULL_LR, ADAPTERS_LR, NEW_DECODER_LR = "5e-5", "2e-4", "3e-4"
SIZES = ("dim", "num_heads", "mlp_ratio")  # set under model.size, which all parts share
INJECTED = ("image_size", "vocab_size", "max_len", "depth", "context_dim")  # determined by the data or by other keys
JOINED_TASKS = ("captioning", "conversations", "image_questions", "preferences")
BACKBONE = "model.encoder.backbone"
CAPTION_TOKENS, ANSWER_TOKENS = 64, 128  # default lengths of texts that evaluations decode
PROMPT_LEN = 2048  # default maximum number of tokens of a training row, with the states of images


def read_folder(
    path: str | None, key: str, *, images_only: bool = False
) -> "tuple[str, FolderSpecification, Metadata]":
    """Returns the path of a folder, its model specification, and the metadata that a checkpoint stores.

    Args:
        key: Config key of the folder, for messages.
        images_only: See `describe_folder`.
    """
    if not path:
        raise UserError(f"{key}: missing; give {key}=FOLDER")
    from vlm.checkpoint.hugging_face import describe_folder  # imports torch, before which `tune` must run
    from vlm.checkpoint.locate import download
    from vlm.models.pretrained.load import open_folder

    folder = str(download(path))
    return folder, *describe_folder(open_folder(folder), images_only=images_only)


def list_prompt_tasks(about: "Metadata") -> tuple[str, ...]:
    """Returns the tasks of a model that reads images inside its texts; without causal attention, those of one turn."""
    assert about["model"] is not None
    is_causal = about["model"]["args"]["decoder"]["args"]["prefix"]["args"]["causal"]
    return JOINED_TASKS if is_causal else tuple(task for task in JOINED_TASKS if task != "conversations")


PROMPT_FIELDS = {  # name and class of the field of texts
    "captioning": ("captions", "prompt_field.CaptionPromptField"),
    "preferences": ("pairs", "preference_field.PreferencePromptField"),
}


def prompt_field_overrides(task: str, folder: str, about: "Metadata") -> Iterator[str]:
    """Yields the overrides for fields that read images inside texts, and for the lengths of texts.

    Args:
        folder: The folder that has the form of prompts.
        about: Its metadata, as a checkpoint stores them. If its model reads only texts, the number of states of an
            image is determined by the encoder that is joined to it.
    """
    is_captioning = task == "captioning"
    name, kind = PROMPT_FIELDS.get(task, ("questions", "prompt_field.QuestionPromptField"))
    yield "task.fields.images._target_=vlm.data.fields.ImageViewsField"
    yield f"task.fields.{name}._target_=vlm.data.text.{kind}"
    yield f"++task.fields.{name}.path={folder}"
    yield f"++task.fields.{name}.states={about['form']['states'] or 'null'}"
    yield f"++task.fields.{name}.preprocess=${{data.preprocess}}"
    yield f"++task.fields.{name}.prompt=null"
    if task == "conversations":
        yield f"~task.fields.{name}.bins"  # the folder's tokenizer has its own tokens
    assert about["model"] is not None
    model_args = about["model"]["args"]
    decoder_args = model_args["decoder"]["args"] if "decoder" in model_args else model_args
    yield f"data.max_len={min(PROMPT_LEN, decoder_args['max_len'])}"
    yield "data.augment=null"
    yield f"task.max_tokens={CAPTION_TOKENS if is_captioning else ANSWER_TOKENS}"


def encoder_overrides(
    spec: Mapping[str, Any], place: str = "model.encoder", *, has_decoder: bool = False
) -> Iterator[str]:
    """Yields the overrides of an encoder. A text encoder without a decoder sets model.size, which its positions use."""
    args, is_text = spec["args"], spec["name"] == "TextEncoder"
    yield f"model/encoder{'' if place == 'model.encoder' else f'@{place}'}={'text' if is_text else 'vit'}"
    yield f"model.size.encoder_depth={args['depth']}"
    if is_text:
        yield from _position_overrides(place, args) if has_decoder else _size_overrides(args)
        yield "model/position=learned"
    elif (positions := args.get("positions")) is not None:
        yield _node_override(f"{place}.positions", positions)
    yield from argument_overrides(
        place, args, (*INJECTED, "positions", *(SIZES if is_text and not has_decoder else ()))
    )


def decoder_overrides(args: Mapping[str, Any], place: str) -> Iterator[str]:
    """Yields the overrides for a decoder's sizes, positions and fusion."""
    positions = args.get("positions") or {"name": None}
    rotary = positions["name"] == "RotaryPositions"
    yield f"model/position={'rotary' if rotary else 'learned'}"
    if rotary:
        yield from argument_overrides("model.position", positions["args"], ("head_dim",))
        yield f"model.position.head_dim={positions['args']['head_dim']}"
    else:
        yield from _position_overrides(place, args)
    yield from _size_overrides(args)
    yield f"model.size.{'depth' if place == 'model' else 'decoder_depth'}={args['depth']}"
    if "prefix" in args:
        yield "model/fusion=prefix"
        yield from argument_overrides("model.fusion", args["prefix"]["args"], ("dim", "context_dim"))
    if "vocabulary_head" in args:
        yield f"++{place}.vocabulary_head._target_=vlm.models.heads.VocabularyHead"
        yield from argument_overrides(f"{place}.vocabulary_head", args["vocabulary_head"]["args"], ("vocab_size",))
    yield from argument_overrides(place, args, (*INJECTED, *SIZES, "prefix", "vocabulary_head", "positions"))


def _position_overrides(place: str, args: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides that give a stack separate positions."""
    if (positions := args.get("positions")) is not None:
        yield f"{place}.positions=null"  # instead of model.position
        yield _node_override(f"{place}.positions", positions)


def _node_override(key: str, spec: Mapping[str, Any]) -> str:
    """Returns the override that sets a key to a class with its arguments."""
    args = {"_target_": expand_name(spec["name"]), **spec["args"]}
    return f"++{key}={{{','.join(f'{name}:{json.dumps(value)}' for name, value in args.items())}}}"


def _size_overrides(args: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"model.size.{name}={args[name]}" for name in SIZES if name in args)


def argument_overrides(place: str, args: Mapping[str, Any], without: Sequence[str]) -> Iterator[str]:
    for name, value in args.items():
        if name not in without:
            yield f"++{place}.{name}={value if isinstance(value, str) else json.dumps(value)}"


def preprocess_overrides(state: Mapping[str, Any]) -> Iterator[str]:
    """Yields the overrides for the preprocessing of images."""
    yield f"data.image_size={as_override(state['image_size'])}"
    yield from (f"++data.preprocess.{name}=[{','.join(map(str, state[name]))}]" for name in ("mean", "std"))
    names = ("resize", "interpolation", "crop", "longest_edge", "tiles")
    yield from (f"++data.preprocess.{name}={state[name]}" for name in names if name in state)
