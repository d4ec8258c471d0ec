"""Reads a Hugging Face folder as a checkpoint: model, tokenizer, preprocessing, special ids, decoding defaults."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from vlm.checkpoint.bounds import check_sizes
from vlm.checkpoint.decoding_defaults import decoding_defaults
from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.checkpoint.sentence_transformers import stated_embedding
from vlm.config.names import FORMAT
from vlm.data.images.hugging_face import read_preprocess
from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import read_form, read_text_form
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.architecture import Spec, class_names
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import hugging_face_state, stored_classes
from vlm.models.pretrained.specification import Specified, specify
from vlm.nn.image_size import ImageSize, plain, sides

NAMED = ("classification", "text_classification", "tagging")  # tasks with classes
LONGEST_TEXT = 256  # default number of tokens that a model writes after a prompt
WINDOW, STRIDE, LONGEST = 384, 128, 30  # default tokens of a window, of its step and of the longest answer


def from_folder(folder: Folder, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Converts a folder to a checkpoint; executes none of its code and fetches nothing.

    Args:
        dtype: Type of the weights, whatever type they are stored in.
    Raises:
        UserError: The folder is damaged, its parts do not fit together, vlm does not support its model, or it holds a
            decoder without a head.
    """
    with _in_a_line(folder):
        _, about = describe_folder(folder)
        if about["model"] is None:
            known = ", ".join(folder.architecture.models)
            raise UserError(
                f"{folder} holds a {folder.origin}, which has no head that writes text; give a folder of {known}"
            )
        stored = folder.weights(mapped=True)
        model = rebuild_shapes(about["model"])  # compared with the stored shapes before anything is allocated
        state, _ = hugging_face_state(model, folder, stored, dtype=dtype)
        held, named = stored_classes(model, folder, stored), len(about.get("classes", ()))
        if held is not None and named and held != named:
            key = "id2label" if "id2label" in folder.config else "num_labels"
            what = f"{key} has {named} classes, the weights of the head have {held}"
            raise UserError(f"{folder.config.file}: {what}; correct {key}, or use the weights that belong to it")
        if lacking := sorted(model.state_dict().keys() - state.keys()):
            raise UserError(f"{folder} has no weights for {', '.join(lacking[:3])}; fetch it again")
        weights = {f"model.{name}": tensor for name, tensor in state.items()}
        return {"format": FORMAT, "vlm": about, "state_dict": weights, "global_step": 0, "epoch": -1}


def describe_folder(folder: Folder, *, images_only: bool = False) -> tuple[Specified, dict[str, Any]]:
    """Returns a folder's model and what a checkpoint holds besides weights, which are not read.

    Args:
        images_only: Whether a dual encoder is read for its image encoder, and may lack a tokenizer that can be used.
    Raises:
        UserError: As `from_folder`, except for a decoder without a head.
    """
    with _in_a_line(folder):
        specified = specify(folder)
        about: dict[str, Any] = {"task": specified.task, "scores": {}, "origin": folder.origin}
        if any("image_size" in part["args"] for part in specified.parts.values()):
            preprocess = read_preprocess(folder)
            specified = specify(folder, image_size=preprocess.image_size)
            _check_images(folder, preprocess.image_size, specified.parts["encoder"])
            about["preprocess"] = preprocess.state()
        about["model"] = specified.model
        with suppress(*((UserError,) if images_only and "text_encoder" in specified.parts else ())):
            about |= _of_texts(folder, specified)
        about |= _of_vectors(folder, specified)
        if about["task"] in NAMED:
            about["classes"] = class_names(folder.config)
        if about["task"] == "text_classification":
            about["pairs"] = None if folder.architecture.pairs else False  # no file states it
        if about["task"] == "span_answering":
            window = min(WINDOW, about["max_len"])
            about |= {"max_len": window, "stride": min(STRIDE, window // 2), "longest": LONGEST, "abstains": False}
        check_sizes(about)
        return specified, about


@contextmanager
def _in_a_line(folder: Folder) -> Iterator[None]:
    """Context that reports only the first of several faults, with their number."""
    try:
        yield
    except UserError as fault:
        first, *others = str(fault).split("\n")
        remedy = [line for line in others if line.startswith(" ")]
        more = f" ({len(others)} more faults)" if others and not remedy else ""
        raise UserError("\n".join([first + more, *remedy])) from fault
    except Exception as fault:  # sizes that are each in range may together break a constructor
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        raise UserError(
            f"{folder.config.file}: does not describe a supported model ({type(fault).__name__}: {reason}); "
            "choose another folder"
        ) from fault


def _check_images(folder: Folder, size: ImageSize, encoder: Spec) -> None:
    if plain(size) != (read := encoder["args"]["image_size"]):
        raise UserError(
            f"{folder} makes images of {plain(size)} pixels, its model reads {read}; use the "
            "preprocessor_config.json that it was trained with"
        )


def _of_texts(folder: Folder, specified: Specified) -> dict[str, Any]:
    """Returns tokenizer, lengths and decoding options of a model that reads or writes texts."""
    about: dict[str, Any] = {}
    *_, (place, texts) = specified.parts.items()  # the decoder, or the only part
    if "vocab_size" not in texts["args"]:
        return about
    tokenizer = _fitting_tokenizer(folder, texts)
    about["tokenizer"] = tokenizer.state()
    if place == "text_encoder" and (text_end := folder.architecture.text_end) is not None:
        config = folder.parts[place].config
        if config.read(text_end) not in (2, tokenizer.eos_id):
            raise config.fault(text_end.name, f"where texts end with {tokenizer.eos_id} in the tokenizer")
    if place != "text_encoder":  # a dual model knows its own length
        about["max_len" if place == "encoder" else "max_tokens"] = texts["args"]["max_len"]
    if specified.task == "translation":
        about |= {"max_len": specified.parts["encoder"]["args"]["max_len"], "pairs": False}
    if isinstance(tokenizer, JsonTokenizer) and folder.architecture.image is not None and specified.model is not None:
        about["form"] = read_form(folder, tokenizer, _states(specified.model["args"]["encoder"])).state()
        about["max_tokens"] = min(LONGEST_TEXT, about["max_tokens"])
    elif specified.task == "language_modeling" and (form := read_text_form(folder, tokenizer)) is not None:
        about["form"] = form.state()
    if place == "decoder":
        generation = folder.generation
        # In an export of vlm, where the language already forces this token.
        if [generation.values.get("forced_bos_token_id")] == tokenizer.begin():
            generation = generation | {"forced_bos_token_id": None}
        about["decoding"] = decoding_defaults(
            generation, prompted="form" in about or specified.task == "language_modeling"
        )
        if more := folder.ends[1:]:
            about["decoding"]["ends"] = more
        for name, stated in (("ends", "eos_token_id"), ("never", "bad_words_ids")):
            if outside := [id for id in about["decoding"].get(name, ()) if id >= tokenizer.vocab_size]:
                raise generation.fault(stated, f"of which {outside[0]} is outside the vocabulary")
    return about


def _of_vectors(folder: Folder, specified: Specified) -> dict[str, Any]:
    """Returns the entries of an encoder used for its vectors: one without a head, or of sentence-transformers."""
    stated = stated_embedding(folder)
    if specified.parts.keys() != {"encoder"} or (specified.model is not None and not stated):
        return {}
    return {"task": "embedding", "model": specified.parts["encoder"], **stated}


def _states(encoder: Spec) -> int:
    """Returns the number of states that an encoder makes of an image."""
    size = encoder["args"]["backbone"]["args"]["image_size"]
    return rebuild_shapes(encoder)(torch.empty(1, 3, *sides(size), device="meta")).states.shape[1]


def _fitting_tokenizer(folder: Folder, texts: Spec) -> Tokenizer:
    """Returns the tokenizer, which must have as many ids as the weights."""
    size, tokenizer = texts["args"]["vocab_size"], read_tokenizer(folder)
    if tokenizer.vocab_size != size:
        raise UserError(
            f"{folder} has a tokenizer of {tokenizer.vocab_size:,} tokens, its weights are of {size:,}; use the "
            "tokenizer that they were trained with"
        )
    return tokenizer
