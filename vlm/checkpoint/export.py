"""Exports checkpoints to folders: in Hugging Face's layout, as safetensors, or as graphs."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vlm.checkpoint.decoding_defaults import OPTIONS
from vlm.checkpoint.graph_files import GRAPHS, graph_files
from vlm.checkpoint.load import load_model, locate, read, weights
from vlm.checkpoint.model_card import model_card
from vlm.checkpoint.specification import FILE as SPECIFICATION
from vlm.checkpoint.verify import refusing
from vlm.data.images.hugging_face import RESAMPLINGS
from vlm.data.images.image import Preprocess
from vlm.data.text.export import tokenizer_files
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.models.pretrained.export import described
from vlm.models.pretrained.folder import OWN
from vlm.nn.image_size import shown

WEIGHTS = "model.safetensors"
Content = str | bytes | Callable[[Path], object]  # content of a file, or a function that writes it


def export(path: str, folder: str, *, form: str, trust: str | None = None) -> list[str]:
    """Writes a checkpoint as a folder.

    Args:
        path: The checkpoint.
        folder: Created if missing; must be empty.
        form: "huggingface", which transformers loads with its own classes, "safetensors", which vlm loads again, or
            "onnx" or "pt2", graphs that ONNX Runtime or torch runs without vlm.
        trust: A package of the user's own whose classes may be built.
    Returns:
        The names of the files.
    Raises:
        UserError: The checkpoint is damaged, Hugging Face has no class or vlm no graph for its model, a package is
            missing, or the folder cannot be written.
    """
    loaded = read(path)
    with refusing(path):
        model = load_model(loaded, trust=trust)  # checks that the weights fit before anything is written
        files: dict[str, Content]
        if form in GRAPHS:
            files = graph_files(loaded["vlm"], model, form=form)
        elif form == "safetensors":
            files = {SPECIFICATION: _json({"format": loaded["format"], "vlm": loaded["vlm"]})}
            files[WEIGHTS] = partial(_save, weights(loaded))
        else:
            config, tensors = described(model)
            files = {**_described_files(loaded["vlm"], config), WEIGHTS: partial(_save, tensors)}
        card = model_card(loaded, locate(path), form=form)
    return _written(Path(folder), {"README.md": card, **files})


def _described_files(about: Mapping[str, Any], config: dict[str, Any]) -> dict[str, str | bytes]:
    """Returns the files other than the weights, by name."""
    files: dict[str, str | bytes] = {}
    if "preprocess" in about:
        processor = _processor(Preprocess.from_state(about["preprocess"]))
        files["preprocessor_config.json"] = _json(processor)
    if "classes" in about:
        names = ["".join(name) for name in about["classes"]]
        config |= {"id2label": {str(n): name for n, name in enumerate(names)}}
        config |= {"label2id": {name: n for n, name in enumerate(names)}}
    if "tokenizer" in about:
        tokenizer = tokenizer_from_state(about["tokenizer"])
        special: dict[str, Any] = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        special["pad_token_id"] = tokenizer.pad_id
        config |= special
        if config.get("is_encoder_decoder"):
            special["decoder_start_token_id"] = config["decoder_start_token_id"] = tokenizer.bos_id
        for part in ("decoder", "text_config"):  # CLIP pools a text by the end token that its own config names
            if part in config:
                config[part] |= {name: id for name, id in special.items() if name != "decoder_start_token_id"}
        # The language token after the begin token is never predicted; if not forced, the first token would be
        # arbitrary.
        first = {"forced_bos_token_id": tokenizer.begin()[0]} if tokenizer.languages else {}
        ends = about.get("decoding", {}).get("ends", ())
        several: dict[str, Any] = {"eos_token_id": [tokenizer.eos_id, *ends]} if ends else {}
        several |= {"forced_eos_token_id": tokenizer.eos_id} if about.get("decoding", {}).get("forced_end") else {}
        files["generation_config.json"] = _json(special | several | first | _generation(about))
        files |= tokenizer_files(tokenizer)
    own = {name: about[name] for name in ("tokenizer", "preprocess") if name in about}
    return {"config.json": _json(config), **files, OWN: _json(own)}


def _generation(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns decoding options by Hugging Face's names; lengths include the begin token."""
    stored = dict(about.get("decoding", {}))
    options = {one.name: stored[ours] for ours, one in OPTIONS.items() if ours in stored and "tokens" not in ours}
    options |= {name: stored[name] for name in ("early_stopping",) if stored.get(name)}
    options |= {"do_sample": True} if stored.get("sample") else {}
    if stored.get("never"):
        options |= {"bad_words_ids": [[token] for token in stored["never"]], "renormalize_logits": True}
    if "max_tokens" in about:  # a model that reads an input
        longest = stored.get("max_tokens", about["max_tokens"])
        options |= {"max_length": int(longest) + 1}
        return options | ({"min_length": int(stored["min_tokens"]) + 1} if stored.get("min_tokens") else {})
    return options | {f"{n}_new_tokens": stored[f"{n}_tokens"] for n in ("min", "max") if f"{n}_tokens" in stored}


def _processor(preprocess: Preprocess) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json for a preprocessing.

    Raises:
        UserError: No processor of Hugging Face does the same.
    """
    height, width = preprocess.image_size
    inner = {"height": int(height / preprocess.crop), "width": int(width / preprocess.crop)}
    number = {name: number for number, name in RESAMPLINGS.items()}[preprocess.interpolation]
    if preprocess.resize == "pad":
        raise UserError(
            "data.preprocess.resize: pad, with a grey border, has no equivalent among Hugging Face's processors; "
            "export --to safetensors"
        )
    shorter = preprocess.resize.startswith("crop")
    if shorter and height != width:
        raise UserError(
            f"data.preprocess.resize: {preprocess.resize}, to images of {shown(preprocess.image_size)} pixels, has no "
            "equivalent among Hugging Face's processors; train with squash, or export --to safetensors"
        )
    sides = {"height": height, "width": width}
    crops = shorter or inner != sides
    cut = {"do_center_crop": True, "crop_size": sides} if crops else {}
    scale = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True}
    means = {"image_mean": list(preprocess.mean), "image_std": list(preprocess.std)}
    kind = "CLIPImageProcessor" if crops else "ViTImageProcessor"
    size = {"shortest_edge": inner["height"]} if shorter else inner
    return {"image_processor_type": kind, "do_resize": True, "size": size, "resample": number, **cut, **scale, **means}


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes weights whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    part = path.with_name(f"{path.name}.part")
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, part, {"format": "pt"})
        shutil.copymode(path.with_name("README.md"), part)  # the library creates files that only their owner can read
        os.replace(part, path)
    except SafetensorError as fault:
        raise OSError(str(fault)) from fault
    finally:
        part.unlink(missing_ok=True)


def _written(folder: Path, files: Mapping[str, Content]) -> list[str]:
    """Writes all files in their order; leaves none of them if one cannot be written.

    Raises:
        UserError: The folder is not empty, or cannot be written.
    """
    begun = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder}: is not empty; choose another folder, or empty it")
        begun = True
        for name, content in files.items():
            if callable(content):
                content(folder / name)
            else:
                (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return sorted(path.name for path in folder.iterdir())
    except (OSError, RuntimeError) as fault:  # torch raises the latter
        for path in folder.iterdir() if begun else ():
            with suppress(OSError):
                path.unlink()
        reason = getattr(fault, "strerror", None) or str(fault).partition("\n")[0]
        raise UserError(f"{folder}: cannot be written ({reason}); choose another folder", 1) from fault
