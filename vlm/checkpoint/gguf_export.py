"""Exports decoders with their tokenizers as GGUF files, for llama.cpp and programs that are built on it."""

import json
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from vlm.checkpoint.graph_files import Content
from vlm.checkpoint.load import load_model
from vlm.checkpoint.stored import Metadata
from vlm.data.text.chat_template import ChatTemplate, find_template
from vlm.data.text.hugging_face import make_tokenizer_files
from vlm.data.text.library import PieceModelTokenizer
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.pretrained.export import convert_model
from vlm.models.pretrained.gguf.config import END_TEXTS, KEY, OPTION_KEYS, SUPPRESSED
from vlm.models.pretrained.gguf.projector import PREPROCESS, make_projector
from vlm.models.pretrained.gguf.vocabulary import make_json_vocabulary, make_sentencepiece_vocabulary
from vlm.models.pretrained.gguf.write import HeaderValue, check_range, make_decoder, write_gguf
from vlm.models.pretrained.load import is_published, open_folder
from vlm.models.pretrained.stack import Spec

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def make_gguf_files(about: Metadata, model: nn.Module, *, kind: str, path: Path, name: str) -> dict[str, Content]:
    """Returns the files of a model by name, checked before anything is written.

    Args:
        about: The entry "vlm" of the checkpoint.
        kind: Type of the matrices: F32, F16 or Q8_0.
        path: The checkpoint.
        name: Name of the model, for general.name.
    Raises:
        UserError: llama.cpp has no such model or tokenizer, or the package gguf is missing.
    """
    if isinstance(model, VisionLanguageModel):
        projector = make_projector(model, about["preprocess"])
        described = {"general.type": "mmproj", "general.name": name, PREPROCESS: json.dumps(about["preprocess"])}
        images = {f"mmproj-model-{kind}.gguf": projector._replace(values={**described, **projector.values})}
        decoder_model = _separate_decoder(about, model)
    elif isinstance(model, Decoder):
        images, decoder_model = {}, model
    else:
        raise UserError(
            f"model: GGUF has no {type(model).__name__}, only language models (Llama, Qwen2, Qwen3, Gemma, GPT-2), "
            "LLaVA and SmolVLM; use --to safetensors or onnx"
        )
    decoder = make_decoder(convert_model(decoder_model))
    if images and decoder.architecture == "gemma":
        raise UserError(
            "model.decoder: cannot be stored in GGUF with an image encoder, because llama.cpp multiplies the states of "
            "images too by the scale of Gemma's embeddings; use --to huggingface or --to safetensors"
        )
    values: dict[str, HeaderValue] = {"general.type": "model", "general.name": name, **decoder.values}
    values |= make_tokenizer_values(about, rows=decoder_model.token_embed.num_embeddings)
    if template := read_chat_template(about, path):
        values["tokenizer.chat_template"] = template
    files = {f"model-{kind}.gguf": decoder._replace(values=values), **images}
    for contents in files.values():
        check_range(contents.tensors, kind)
    return {name: partial(write_gguf, contents=contents, kind=kind) for name, contents in files.items()}


def _separate_decoder(about: Metadata, model: VisionLanguageModel) -> Decoder:
    """Returns the decoder of a model that reads images inside its text, as a language model with the same weights.

    Raises:
        UserError: It reads images otherwise.
    """
    spec = cast(Spec, about["model"])["args"]["decoder"]
    prefix = spec["args"].get("prefix", {}).get("args", {})
    if not prefix.get("counted") or not prefix.get("causal", True):
        raise UserError(
            "model.decoder: GGUF has decoders that read images causally inside their text, as LLaVA and SmolVLM do; "
            "use --to safetensors"
        )
    plain = {"name": spec["name"], "args": {name: value for name, value in spec["args"].items() if name != "prefix"}}
    state = {f"model.{name}": tensor for name, tensor in model.decoder.state_dict().items() if "prefix" not in name}
    return cast(Decoder, load_model({"vlm": {"model": plain}, "state_dict": state}))


def make_tokenizer_values(about: Metadata, *, rows: int) -> dict[str, HeaderValue]:
    """Returns the values of a header about the tokenizer, the tokens that end a text, and sampling.

    Args:
        rows: Number of rows of the embedding.
    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    tokenizer = tokenizer_from_state(about["tokenizer"])
    try:
        values = _convert_vocabulary(tokenizer, rows)
    except ValueError as fault:
        raise UserError(
            f"tokenizer: cannot be stored in GGUF: {fault}; use --to huggingface or --to safetensors"
        ) from fault
    values |= {f"{KEY}bos_token_id": tokenizer.bos_id, f"{KEY}padding_token_id": tokenizer.pad_id}
    if tokenizer.unk_id is not None:
        values[f"{KEY}unknown_token_id"] = tokenizer.unk_id
    decoding: Mapping[str, Any] = about.get("decoding", {})
    ends = [tokenizer.eos_id, *decoding.get("ends", ())]
    tokens = values[f"{KEY}tokens"]
    assert isinstance(tokens, list)
    # llama.cpp has three keys for them, and recognises others by their texts.
    others = [end for end in ends[1:] if tokens[end] not in END_TEXTS]
    recognised = [end for end in ends[1:] if end not in others]
    if len(others) > len(END_KEYS) - 1:
        raise UserError(
            f"tokenizer: has {len(ends)} tokens that end a text, GGUF at most {len(END_KEYS)} such as "
            f"{tokens[others[-1]]!r:.40}; use --to huggingface"
        )
    values |= {f"{KEY}{key}": end for key, end in zip(END_KEYS, [ends[0], *others, *recognised], strict=False)}
    if decoding.get("never"):
        values[SUPPRESSED] = [*decoding["never"]]
    values |= {key: decoding[option] for option, key in OPTION_KEYS.items() if option in decoding}
    return values


def _convert_vocabulary(tokenizer: Tokenizer, rows: int) -> dict[str, HeaderValue]:
    """Returns the values about the vocabulary.

    Raises:
        ValueError: llama.cpp has no such tokenizer.
    """
    starts = [*tokenizer.starts]
    if starts not in ([], [tokenizer.bos_id]):
        raise ValueError(f"its texts start with the tokens {starts}, not with the begin token alone")
    if isinstance(tokenizer, PieceModelTokenizer) and not tokenizer.canonicalises:
        return make_sentencepiece_vocabulary(tokenizer.model(), rows, begins=bool(starts))
    content = make_tokenizer_files(tokenizer).get("tokenizer.json")
    if content is None:
        raise ValueError(f"it is a {type(tokenizer).__name__}")
    return make_json_vocabulary(json.loads(content), rows, begins=bool(starts))


def read_chat_template(about: Metadata, path: Path) -> str | None:
    """Returns the chat template of a checkpoint, or of a folder whose tokenizer needs none; None if there is none."""
    if "form" in about and isinstance(chat := PromptForm.of(about["form"]).chat, ChatTemplate):
        return chat.text
    found = find_template(open_folder(path)) if is_published(path) else None
    return None if found is None else found[1] or None


def make_gguf_commands(names: Collection[str]) -> list[str]:
    """Returns the commands that run exported files, for a model card."""
    model = next(name for name in names if name.startswith("model-"))
    if projector := next((name for name in names if name.startswith("mmproj-")), None):
        return [
            f'llama-mtmd-cli -m {model} --mmproj {projector} --image photo.jpg -p "What is this?"  # of llama.cpp',
            f"vlm caption photo.jpg -c {model} --mmproj {projector}",
        ]
    return [f"llama-cli -m {model}  # of llama.cpp", f'vlm generate -c {model} --prompt "A"']
