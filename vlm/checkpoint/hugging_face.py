"""Reads a Hugging Face folder as a checkpoint: model, tokenizer, preprocessing, decoding defaults."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from vlm.checkpoint.bounds import check_sizes
from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.config.names import FORMAT
from vlm.data.images.hugging_face import read_preprocess
from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import read_form, read_text_form
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.architecture import Spec, class_names
from vlm.models.pretrained.fields import Fields, choice, flag, integer, number
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import hugging_face_state, stored_classes
from vlm.models.pretrained.specification import Specified, specify
from vlm.nn.image_size import ImageSize, plain, sides

# Options of vlm, each with its field in generation_config.json.
OPTIONS = {
    "beam": integer("num_beams", high=1024),
    "length_penalty": number("length_penalty", low=-100, high=100),
    "no_repeat_ngram": integer("no_repeat_ngram_size", low=0, high=1024),
    "repetition_penalty": number("repetition_penalty", low=1e-3, high=1e3),
    "min_tokens": integer("min_new_tokens", low=0),
    "max_tokens": integer("max_new_tokens"),
    "temperature": number("temperature", high=1e3),
    "top_k": integer("top_k", low=-1),
    "top_p": number("top_p"),
    "min_p": number("min_p"),
}
EARLY_STOPPING = choice("early_stopping", None, {False: False, True: True, "never": "never"})
# Options that change a text and are not supported, with their values that change nothing.
REFUSED: dict[str, tuple] = {
    "forced_bos_token_id": (None,),
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "sequence_bias"), (None, [])),
    **dict.fromkeys(("force_words_ids", "constraints", "penalty_alpha"), (None, [])),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"), (None, 0)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p"), (None, 1, 1.0)),
    **dict.fromkeys(("diversity_penalty", "epsilon_cutoff", "eta_cutoff", "num_beam_groups"), (None, 0, 0.0, 1)),
    **dict.fromkeys(("top_h", "max_time", "watermarking_config", "dola_layers"), (None,)),
    "stop_strings": (None, [], ""),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "cache_implementation": (None, "dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window"),
}
LENGTH = 20  # default number of tokens, if a folder states none


def decoding_defaults(generation: Fields, *, prompted: bool) -> dict[str, Any]:
    """Returns the defaults in a folder's generation_config.json.

    Args:
        prompted: Whether texts continue prompts. The stated lengths would then include the prompt, and are left to the
            user.
    Raises:
        UserError: A value is out of bounds, or changes texts in a way that is not supported.
    """
    for name, neutral in REFUSED.items():
        if generation.values.get(name) not in neutral:
            raise generation.fault(name, "which is not done here")
    defaults = {} if prompted else {"max_tokens": LENGTH, **_lengths(generation)}
    defaults |= {"early_stopping": generation.read(EARLY_STOPPING) or False, "end_counts": True}
    stated = {ours: generation.read(option) for ours, option in OPTIONS.items()}
    defaults |= {ours: value for ours, value in stated.items() if value is not None}
    defaults = {ours: value for ours, value in defaults.items() if value != 0 or ours != "min_tokens"}
    defaults |= _ends_and_bans(generation)
    if generation.read(flag("do_sample")):
        defaults |= {"sample": True, "top_k": defaults.get("top_k", 50)}
    return defaults


def _ends_and_bans(generation: Fields) -> dict[str, Any]:
    """Returns whether the last token must be the end token, and the tokens that are never generated.

    A ban applies before probabilities are computed, as with `renormalize_logits`, which Marian's folders state.
    """
    end, banned = generation.values.get("forced_eos_token_id"), generation.values.get("bad_words_ids") or []
    if end not in (None, generation.values.get("eos_token_id")):
        raise generation.fault("forced_eos_token_id", "not the end token")
    listed = isinstance(banned, list) and all(isinstance(words, list) and len(words) == 1 for words in banned)
    tokens = [token for (token,) in banned] if listed else [None]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise generation.fault("bad_words_ids", "not a list of single tokens")
    return ({} if end is None else {"forced_end": True}) | ({"never": tokens} if tokens else {})


def _lengths(generation: Fields) -> dict[str, int]:
    """Converts stated lengths, which include the begin token, to numbers of tokens without it."""
    read = {f"{end}_tokens": generation.read(integer(f"{end}_length", low=0)) for end in ("max", "min")}
    return {ours: length - 1 for ours, length in read.items() if length and length > 1}


MODULES, OWN = "modules.json", "sentence_bert_config.json"
POOLINGS = {"mean": "mean", "cls": "first"}  # sentence-transformers' name -> vlm's
OLD_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # as in most published folders
ORDER = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def stated_embedding(folder: Folder) -> dict[str, Any]:
    """Returns pooling, normalisation and longest text of a folder, as in a checkpoint; empty for any other folder.

    Raises:
        UserError: The folder is damaged, or asks for something unsupported.
    """
    content = folder.text(MODULES)
    if content is None:
        return {}
    file = folder.path / MODULES
    try:
        modules = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in json.loads(content)}
    except (RecursionError, ValueError, KeyError, TypeError) as fault:
        raise UserError(f"{file} cannot be read ({fault}); restore the file") from fault
    if list(modules) not in ORDER or modules["Transformer"]:
        raise UserError(
            f"{file}: lists {', '.join(modules)[:100]}; what is read is a Transformer in the folder itself, "
            "Pooling and Normalize; choose another folder"
        )
    embedding = {"pooling": _pooling(folder, f"{modules['Pooling']}/config.json"), "normalize": "Normalize" in modules}
    _refuse_prompts(folder.json("config_sentence_transformers.json"))
    length = _longest(folder)
    return {"embedding": embedding} | ({} if length is None else {"max_len": length})


def _pooling(folder: Folder, name: str) -> str:
    config = folder.json(name)
    if config is None:
        raise UserError(f"{folder} has no {name}; fetch it again")
    mode = config.values.get("pooling_mode")
    if mode is None:
        chosen = [key for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True]
        mode = OLD_POOLINGS.get(chosen[0], chosen[0]) if len(chosen) == 1 else chosen
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise UserError(f"{config.file}: pools by {mode!r:.60}; what is read is mean or cls; choose another folder")
    return POOLINGS[mode]


def _refuse_prompts(config: Fields | None) -> None:
    """Refuses a default prompt before each text, which vlm does not add."""
    if config is not None and "default_prompt_name" in config:
        raise config.fault("default_prompt_name", "a prompt before each text, which is not added")


def _longest(folder: Folder) -> int | None:
    """Reads the longest text in tokens, from sentence_bert_config.json or, in newer folders, tokenizer_config.json."""
    own, tokenizer = folder.json(OWN), folder.json("tokenizer_config.json")
    if own is not None and own.read(flag("do_lower_case", False)):
        raise own.fault("do_lower_case", "which is not done beside the tokenizer")
    if own is not None and "max_seq_length" in own:
        return own.read(integer("max_seq_length", low=3))
    stated = None if tokenizer is None else tokenizer.values.get("model_max_length")
    return stated if type(stated) is int and 3 <= stated <= 2**20 else None


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
