"""Reads a Hugging Face folder as a checkpoint: model, tokenizer, preprocessing, decoding defaults."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, cast

import torch

from vlm.checkpoint.rebuild import rebuild_shapes
from vlm.checkpoint.stored import FORMAT, Checkpoint, DecodingDefaults, Metadata
from vlm.data.images.hugging_face import read_preprocess
from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.library import JsonTokenizer
from vlm.data.text.prompt_form import read_form, read_text_form
from vlm.data.text.tokenizer import BuiltTokenizerState
from vlm.data.text.tokenizer_base import Tokenizer
from vlm.errors import UserError
from vlm.models.pretrained.architecture import read_class_names
from vlm.models.pretrained.fields import Fields, choice, flag, integer, number, refuse_unread_keys
from vlm.models.pretrained.folder import Folder, FolderSpecification, specify
from vlm.models.pretrained.load import convert_hugging_face, count_stored_classes
from vlm.models.pretrained.stack import Spec
from vlm.nn.image_size import plain, sides
from vlm.untrusted.sizes import check_sizes

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
UNSUPPORTED: dict[str, tuple] = {
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
# Keys that change no text: speed and memory, drafts that the model checks, what `generate` returns besides texts, and
# what custom code of old folders reads.
NEUTRAL = {
    *("cache_config", "max_cache_len", "prefill_chunk_size", "low_memory", "compile_config", "disable_compile"),
    *("continuous_batching_config", "use_mtp", "is_assistant", "num_assistant_tokens", "speculation_type"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit"),
    *("assistant_lookbehind", "assistant_ensemble_weight", "target_lookbehind", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "output_logits", "trust_remote_code", "chat_format", "max_window_size"),
}
DEFAULT_LENGTH = 20  # default number of tokens, if a folder states none


def read_decoding_defaults(generation: Fields, *, prompted: bool) -> DecodingDefaults:
    """Returns the defaults in a folder's generation_config.json.

    Args:
        prompted: Whether texts continue prompts. The stated lengths would include the prompt and are ignored.
    Raises:
        UserError: A value is out of bounds, or changes texts in a way that is not supported, or a key is unknown.
    """
    for name, neutral in UNSUPPORTED.items():
        if generation.get(name) not in neutral:
            raise generation.error(name, "which vlm does not support")
    defaults: dict[str, Any] = {}
    if not prompted:  # stated lengths include the begin token
        stated = {f"{end}_tokens": generation.read(integer(f"{end}_length", low=0)) for end in ("max", "min")}
        lengths = {ours: length - 1 for ours, length in stated.items() if length and length > 1}
        defaults = {"max_tokens": DEFAULT_LENGTH, **lengths}
    defaults |= {"early_stopping": generation.read(EARLY_STOPPING) or False, "end_counts": True}
    options = {ours: generation.read(option) for ours, option in OPTIONS.items()}
    defaults |= {ours: value for ours, value in options.items() if value is not None}
    defaults = {ours: value for ours, value in defaults.items() if value != 0 or ours != "min_tokens"}
    defaults |= _read_ends_and_bans(generation)
    if generation.read(flag("do_sample")):
        defaults |= {"sample": True, "top_k": defaults.get("top_k", 50)}
    if not generation.within:  # keys inside config.json are checked with it
        refuse_unread_keys(generation, {"": NEUTRAL})
    return cast(DecodingDefaults, defaults)


def _read_ends_and_bans(generation: Fields) -> DecodingDefaults:
    """Returns whether the last token must be the end token, and the tokens that are never generated.

    A ban applies before probabilities are computed, as with `renormalize_logits`, which Marian's folders state.
    """
    end = generation.values.get("forced_eos_token_id")
    banned: Any = generation.values.get("bad_words_ids") or []
    if end not in (None, generation.values.get("eos_token_id")):
        raise generation.error("forced_eos_token_id", "not the end token")
    single = isinstance(banned, list) and all(isinstance(words, list) and len(words) == 1 for words in banned)
    tokens: list[Any] = [token for (token,) in banned] if single else [None]
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise generation.error("bad_words_ids", "not a list of single tokens")
    found: DecodingDefaults = {}
    if end is not None:
        found["forced_end"] = True
    if tokens:
        found["never"] = tokens
    return found


MODULES, SENTENCE_BERT_CONFIG = "modules.json", "sentence_bert_config.json"
POOLINGS = {"mean": "mean", "cls": "first"}  # sentence-transformers' name -> vlm's
OLD_POOLINGS = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}  # as in most published folders
ORDER = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])


def read_embedding(folder: Folder) -> Metadata:
    """Returns pooling, normalisation and longest text of a folder, as in a checkpoint; empty for any other folder.

    Raises:
        UserError: The folder is damaged, or asks for something unsupported.
    """
    content = folder.read_text(MODULES)
    if content is None:
        return {}
    file = folder.path / MODULES
    try:
        modules = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in json.loads(content)}
    except (RecursionError, ValueError, KeyError, TypeError) as fault:
        raise UserError(f"{file} cannot be read ({fault}); restore the file") from fault
    if list(modules) not in ORDER or modules["Transformer"]:
        raise UserError(
            f"{file}: lists {', '.join(modules)[:100]}; supported are a Transformer in the folder itself, Pooling and "
            "Normalize; choose another folder"
        )
    embedding: dict[str, str | bool] = {
        "pooling": _read_pooling(folder, f"{modules['Pooling']}/config.json"),
        "normalize": "Normalize" in modules,
    }
    prompts = folder.read_json("config_sentence_transformers.json")
    if prompts is not None and "default_prompt_name" in prompts:
        raise prompts.error("default_prompt_name", "a prompt before each text, which vlm does not add")
    found: Metadata = {"embedding": embedding}
    if (length := _read_max_length(folder)) is not None:
        found["max_len"] = length
    return found


def _read_pooling(folder: Folder, name: str) -> str:
    config = folder.read_json(name)
    if config is None:
        raise UserError(f"{folder} has no {name}; download it again")
    mode = config.values.get("pooling_mode")
    if mode is None:
        chosen = [key for key, value in config.values.items() if key.startswith("pooling_mode_") and value is True]
        mode = OLD_POOLINGS.get(chosen[0], chosen[0]) if len(chosen) == 1 else chosen
    if not isinstance(mode, str) or mode not in POOLINGS:
        raise UserError(f"{config.file}: pools by {mode!r:.60}; supported are mean and cls; choose another folder")
    return POOLINGS[mode]


def _read_max_length(folder: Folder) -> int | None:
    """Reads the longest text in tokens, from sentence_bert_config.json or, in newer folders, tokenizer_config.json."""
    config, tokenizer = folder.read_json(SENTENCE_BERT_CONFIG), folder.read_json("tokenizer_config.json")
    if config is not None and config.read(flag("do_lower_case", False)):
        raise config.error("do_lower_case", "which vlm supports in the tokenizer only")
    if config is not None and "max_seq_length" in config:
        return config.read(integer("max_seq_length", low=3))
    stated = None if tokenizer is None else tokenizer.values.get("model_max_length")
    return stated if type(stated) is int and 3 <= stated <= 2**20 else None


TASKS_WITH_CLASSES = ("classification", "text_classification", "tagging")  # tasks with classes
LONGEST_TEXT = 256  # default number of tokens that a model writes after a prompt
WINDOW, STRIDE, LONGEST = 384, 128, 30  # default tokens of a window, of its step and of the longest answer


def from_folder(folder: Folder, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Converts a folder to a checkpoint; executes none of its code and fetches nothing.

    Args:
        dtype: Type of the weights, whatever type they are stored in; as in `convert_hugging_face`.
    Raises:
        UserError: The folder is damaged, its parts do not fit together, vlm does not support its model, or it holds a
            decoder without a head.
    """
    with _report_first_fault(folder):
        _, about = describe_folder(folder)
        if about["model"] is None:
            supported = ", ".join(folder.architecture.models)
            raise UserError(
                f"{folder} holds a {folder.origin}, which has no head that writes text; give a folder of {supported}"
            )
        stored = folder.read_weights(mapped=True)
        model = rebuild_shapes(about["model"])  # compared with the stored shapes before anything is allocated
        state, _ = convert_hugging_face(model, folder, stored, dtype=dtype)
        stored_count, count = count_stored_classes(model, folder, stored), len(about.get("classes", ()))
        if stored_count is not None and count and stored_count != count:
            key = "id2label" if "id2label" in folder.config else "num_labels"
            what = f"{key} has {count} classes, the weights of the head have {stored_count}"
            raise UserError(f"{folder.config.file}: {what}; correct {key}, or use the weights that belong to it")
        if lacking := sorted(model.state_dict().keys() - state.keys()):
            raise UserError(f"{folder} has no weights for {', '.join(lacking[:3])}; download it again")
        weights = {f"model.{name}": tensor for name, tensor in state.items()}
        return {"format": FORMAT, "vlm": about, "state_dict": weights, "global_step": 0, "epoch": -1}


def describe_folder(folder: Folder, *, images_only: bool = False) -> tuple[FolderSpecification, Metadata]:
    """Returns a folder's model and what a checkpoint holds besides weights, which are not read.

    Args:
        images_only: Whether a dual encoder is read for its image encoder, and may lack a tokenizer that can be used.
    Raises:
        UserError: As `from_folder`, except for a decoder without a head.
    """
    with _report_first_fault(folder):
        specified = specify(folder)
        about: Metadata = {"task": specified.task, "scores": {}, "origin": folder.origin}
        if any("image_size" in part["args"] for part in specified.parts.values()):
            preprocess = read_preprocess(folder)
            specified = specify(folder, image_size=preprocess.image_size)
            size, read = preprocess.image_size, specified.parts["encoder"]["args"]["image_size"]
            if plain(size) != read:
                raise UserError(
                    f"{folder}: the preprocessor makes images of {plain(size)} pixels, the model reads {read}; use the "
                    "preprocessor_config.json that it was trained with"
                )
            about["preprocess"] = preprocess.state()
        about["model"] = specified.model
        with suppress(*((UserError,) if images_only and "text_encoder" in specified.parts else ())):
            about |= _describe_texts(folder, specified)
        embedding = read_embedding(folder)
        if specified.parts.keys() == {"encoder"} and (specified.model is None or embedding):  # used for its vectors
            about |= {"task": "embedding", "model": specified.parts["encoder"], **embedding}
        if about["task"] in TASKS_WITH_CLASSES:
            about["classes"] = read_class_names(folder.config)
        if about["task"] == "text_classification":
            about["pairs"] = None if folder.architecture.supports_pairs else False  # no file states it
        if about["task"] == "span_answering":
            window = min(WINDOW, about["max_len"])
            about |= {"max_len": window, "stride": min(STRIDE, window // 2), "longest": LONGEST, "abstains": False}
        check_sizes(about)
        return specified, about


@contextmanager
def _report_first_fault(folder: Folder) -> Iterator[None]:
    """Context that reports the first of several errors and the number of the others."""
    try:
        yield
    except UserError as fault:
        first, *further = str(fault).split("\n")
        remedy = [line for line in further if line.startswith(" ")]
        more = f" ({len(further)} more errors)" if further and not remedy else ""
        raise UserError("\n".join([first + more, *remedy])) from fault
    except Exception as fault:  # sizes that are each in range may together break a constructor
        reason = (str(fault).strip().splitlines() or [""])[0][:200]
        raise UserError(
            f"{folder.config.file}: does not describe a supported model ({type(fault).__name__}: {reason}); "
            "choose another folder"
        ) from fault


def _describe_texts(folder: Folder, specified: FolderSpecification) -> Metadata:
    """Returns tokenizer, lengths and decoding options of a model that reads or writes texts."""
    about: Metadata = {}
    *_, (place, texts) = specified.parts.items()  # the decoder, or the only part
    if "vocab_size" not in texts["args"]:
        return about
    tokenizer = _read_matching_tokenizer(folder, texts)
    about["tokenizer"] = BuiltTokenizerState(tokenizer)
    if place == "text_encoder" and (text_end := folder.architecture.text_end_id) is not None:
        config = folder.parts[place].config
        if config.read(text_end) not in (2, tokenizer.eos_id):
            raise config.error(text_end.name, f"but the tokenizer ends texts with {tokenizer.eos_id}")
    if place == "encoder":
        about["max_len"] = texts["args"]["max_len"]
    elif place != "text_encoder":  # a dual encoder has its own length
        about["max_tokens"] = texts["args"]["max_len"]
    if specified.task == "translation":
        about |= {"max_len": specified.parts["encoder"]["args"]["max_len"], "pairs": False}
    if isinstance(tokenizer, JsonTokenizer) and folder.architecture.image is not None and specified.model is not None:
        encoder = specified.model["args"]["encoder"]
        example = torch.empty(1, 3, *sides(encoder["args"]["backbone"]["args"]["image_size"]), device="meta")
        states = rebuild_shapes(encoder)(example).states.shape[1]  # of an image
        about["form"] = read_form(folder, tokenizer, states).state()
        about["max_tokens"] = min(LONGEST_TEXT, about["max_tokens"])
    elif specified.task == "language_modeling" and (form := read_text_form(folder, tokenizer)) is not None:
        about["form"] = form.state()
    if place == "decoder":
        generation = folder.generation
        # In an export of vlm, where the language already forces this token.
        if [generation.values.get("forced_bos_token_id")] == tokenizer.begin():
            generation = generation | {"forced_bos_token_id": None}
        about["decoding"] = read_decoding_defaults(
            generation, prompted="form" in about or specified.task == "language_modeling"
        )
        if more := folder.end_ids[1:]:
            about["decoding"]["ends"] = more
        checked: tuple[tuple[Literal["ends", "never"], str], ...] = (
            ("ends", "eos_token_id"),
            ("never", "bad_words_ids"),
        )
        for name, stated in checked:
            if outside := [id for id in about["decoding"].get(name, ()) if id >= tokenizer.vocab_size]:
                raise generation.error(stated, f"but {outside[0]} is outside the vocabulary")
    return about


def _read_matching_tokenizer(folder: Folder, texts: Spec) -> Tokenizer:
    """Returns the tokenizer, which must have as many ids as the weights."""
    size, tokenizer = texts["args"]["vocab_size"], read_tokenizer(folder)
    if tokenizer.vocab_size != size:
        raise UserError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size:,} tokens, the weights have {size:,}; use the "
            "tokenizer that they were trained with"
        )
    return tokenizer
