"""Exports checkpoints to folders: in Hugging Face's layout, as safetensors, or as graphs, with a model card."""

import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vlm.checkpoint.file import FILE as SPECIFICATION
from vlm.checkpoint.file import inference_weights
from vlm.checkpoint.gguf_export import make_gguf_commands, make_gguf_files
from vlm.checkpoint.graph_files import GRAPHS, Content, make_graph_files
from vlm.checkpoint.hugging_face import OPTIONS
from vlm.checkpoint.load import load_model, locate, read
from vlm.checkpoint.peft_export import convert_checkpoint, make_peft_example
from vlm.checkpoint.processor_files import (
    ImageTextModel,
    add_image_token,
    make_processor_files,
    reads_images_inside_prompts,
)
from vlm.checkpoint.rebuild import convert_errors
from vlm.checkpoint.stored import Checkpoint, Metadata, restore_interpolations
from vlm.config.tree import resolve
from vlm.data.images.hugging_face import PROCESSOR_FILE, RESAMPLINGS
from vlm.data.images.image import Preprocess
from vlm.data.text.chat_template import ChatTemplate
from vlm.data.text.hugging_face import make_tokenizer_files
from vlm.data.text.prompt_form import PromptForm
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.errors import UserError
from vlm.io.terminal import shell_line
from vlm.models.pretrained.adapted import WEIGHTS as ADAPTER_WEIGHTS
from vlm.models.pretrained.export import convert_model
from vlm.models.pretrained.folder import METADATA
from vlm.models.pretrained.place import ADAPTER_CONFIG
from vlm.nn.image_size import format_size

PIPELINES = {
    "captioning": "image-to-text",
    "classification": "image-classification",
    "contrastive": "zero-shot-image-classification",
    "language_modeling": "text-generation",
    "translation": "translation",
}
USAGE = {
    "captioning": """model = transformers.VisionEncoderDecoderModel.from_pretrained(folder)
processor = transformers.AutoImageProcessor.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
ids = model.generate(**processor(photo, return_tensors="pt"))
tokenizer.batch_decode(ids, skip_special_tokens=True)""",
    "classification": """model = transformers.AutoModelForImageClassification.from_pretrained(folder)
processor = transformers.AutoImageProcessor.from_pretrained(folder)
logits = model(**processor(photo, return_tensors="pt")).logits""",
    "contrastive": """model = transformers.AutoModel.from_pretrained(folder)
processor = transformers.AutoImageProcessor.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
texts = tokenizer(["a photo of a dog", "a photo of a cat"], padding=True, return_tensors="pt")
model(**texts, **processor(photo, return_tensors="pt")).logits_per_image""",
    "language_modeling": """model = transformers.AutoModelForCausalLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model.generate(**tokenizer("A", return_tensors="pt"))""",
    "translation": """model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
ids = model.generate(**tokenizer(["A text."], return_tensors="pt"))
tokenizer.batch_decode(ids, skip_special_tokens=True)""",
}

IMAGE_TEXT_USAGE = """model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
processor = transformers.AutoProcessor.from_pretrained(folder)
inputs = processor(text=prompt, images=[photo], return_tensors="pt")  # the prompt has <image> once
ids = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
processor.batch_decode(ids, skip_special_tokens=True)"""


def _make_graph_example(package: str, load_code: str) -> list[str]:
    return [
        *("import json", f"import {package}", ""),
        'about = json.load(open(f"{folder}/graphs.json"))  # inputs, outputs, images, special tokens, classes',
        'files = {name: graph["file"] for name, graph in about["graphs"].items()}',
        "graphs = {name: " + load_code.format('f"{folder}/{file}"') + " for name, file in files.items()}",
    ]


GRAPH_USAGE = {
    "safetensors": ["import vlm", "", "model = vlm.load(folder)"],
    "onnx": _make_graph_example("onnxruntime", "onnxruntime.InferenceSession({})"),
    "pt2": _make_graph_example("torch", "torch.export.load({}).module()"),
}


def _write_card(loaded: Checkpoint, path: Path, form: str, names: Collection[str]) -> Iterator[str]:
    """Yields the lines of a checkpoint's model card: use, data, training, scores, sizes, limits.

    Args:
        path: The checkpoint, in the folder of its run if there is one.
        form: Form of the export.
        names: Names of the exported files.
    """
    about = loaded["vlm"]
    task = str(about["task"])
    reads_images_in_text = form == "huggingface" and PROCESSOR_FILE in names
    pipeline = "image-text-to-text" if reads_images_in_text else PIPELINES.get(task)
    library = {"huggingface": "transformers", "safetensors": "vlm-lightning", "pt2": "pytorch"}.get(form, form)
    yield from ("---", f"library_name: {library}", *([f"pipeline_tag: {pipeline}"] if pipeline else []), "---", "")
    yield from (f"# A model for {task.replace('_', ' ')}", "", "Trained and exported by vlm.", "", "## Use", "")
    if form == "gguf":
        yield from ("```bash", *make_gguf_commands(names), "```", "")
    else:
        code = IMAGE_TEXT_USAGE if reads_images_in_text else USAGE.get(task, "")
        if form == "huggingface":
            use = ["import transformers", "", code]
        else:
            use = make_peft_example(loaded) if form == "peft" else GRAPH_USAGE[form]
        yield from ("```python", *use, "```", "")
    yield from ("## Data and training", "", *_describe_training(loaded), "")
    yield from ("## Scores", "", *_format_scores(about, path), "")
    yield from ("## Sizes", "", *_describe_sizes(loaded), "")
    yield from ("## Limits", "")
    yield "- It is limited to what its training data show, but it also answers for other images and texts."
    yield "- Its probabilities are not calibrated for other data. Try it on your own before you rely on it."
    if about.get("origin"):
        yield "- The limits of the weights that it started from also apply."


def _describe_training(loaded: Checkpoint) -> Iterator[str]:
    about = loaded["vlm"]
    if "config" not in about:
        yield f"Weights of a {about.get('origin', 'model')} of Hugging Face, whose own card has them."
        return
    config = resolve(restore_interpolations(about["config"]))
    source = config["data"]["source"]
    yield f"- data: {source['_class_']}, fingerprint `{about.get('data')}`; their licence is not recorded"
    command = ""
    if isinstance(about.get("typed"), list):  # older checkpoints lack it
        public = (re.sub(r"(^|=)['\"]?/.*/", r"\1.../", str(text)) for text in about["typed"])  # hides the user's name
        command = f"; it was started with\n\n      {shell_line(['vlm', 'train', *public])}\n"
    yield f"- run: {config['name']}, task {config['task_name']}{command}"
    yield f"- steps: {loaded.get('global_step', 0):,}, epochs begun: {loaded.get('epoch', -1) + 1}"
    for group in ("optim", "schedule"):
        values = {key: value for key, value in config[group].items() if not isinstance(value, dict | list)}
        yield f"- {group}: " + ", ".join(f"{key.strip('_')} {value}" for key, value in values.items())
    yield f"- batch: {config['data'].get('batch_size')} samples, seed {config['seed']}"


def _format_scores(about: Metadata, path: Path) -> Iterator[str]:
    """Yields the lines of a table of scores: those of the run's evaluation if there is one, else the checkpoint's."""
    scores = dict(about.get("scores") or {})
    for file in sorted(path.resolve().parent.parent.glob("evaluation/*/metrics.json")):
        scores = json.loads(file.read_text(encoding="utf-8"))
    if not scores:
        yield "None are recorded."
        return
    split = next(iter(scores)).split("/")[0]
    values = {name.partition("/")[2]: value for name, value in scores.items()}
    kinds = {name.partition("@")[2] for name in values if "@" in name}
    columns = [kind for kind in ("low", "high") if kind in kinds] + sorted(kinds - {"low", "high"})
    intervals = " `low` and `high` bound the 95% interval." if "low" in kinds else ""
    controls = " The other columns are controls." if kinds - {"low", "high"} else ""
    yield f"On the {split} split.{intervals}{controls}"
    yield from ("", f"| metric | model |{''.join(f' {kind} |' for kind in columns)}", "|---" * (len(columns) + 2) + "|")
    for name in (name for name in values if "@" not in name):
        cells = [values[name], *(values.get(f"{name}@{kind}") for kind in columns)]
        yield f"| {name} | " + " | ".join("" if score is None else f"{score:.4f}" for score in cells) + " |"


def _describe_sizes(loaded: Checkpoint) -> Iterator[str]:
    about, tensors = loaded["vlm"], inference_weights(loaded)
    yield f"- parameters: {sum(tensor.numel() for tensor in tensors.values()):,}"
    if "preprocess" in about:
        yield f"- images: {format_size(about['preprocess']['image_size'])} pixels"
    if "max_tokens" in about:
        yield f"- texts: up to {about['max_tokens']} tokens"
    if "classes" in about:
        yield f"- classes: {len(about['classes'])}"


WEIGHTS = "model.safetensors"


def export(path: str, folder: str, *, form: str, trust: str | None = None, outtype: str = "f16") -> list[str]:
    """Writes a checkpoint as a folder.

    Args:
        path: The checkpoint.
        folder: Created if missing; must be empty.
        form: "huggingface", which transformers loads with its own classes, "safetensors", which vlm loads again,
            "gguf", for llama.cpp, "peft", adapters without their base, or "onnx" or "pt2", graphs that ONNX Runtime or
            torch runs without vlm.
        trust: A package of the user's own whose classes may be built.
        outtype: Type of the matrices in GGUF: f32, f16 or q8_0.
    Returns:
        The names of the files.
    Raises:
        UserError: The checkpoint is damaged, Hugging Face has no class or vlm no graph for its model, a package is
            missing, or the folder cannot be written.
    """
    loaded = read(path)
    with convert_errors(path):
        model = load_model(loaded, trust=trust)  # checks that the weights fit before anything is written
        files: dict[str, Content]
        if form in GRAPHS:
            files = make_graph_files(loaded["vlm"], model, form=form)
        elif form == "gguf":
            name = Path(folder).resolve().name
            files = make_gguf_files(loaded["vlm"], model, kind=outtype.upper(), path=locate(path), name=name)
        elif form == "peft":
            config, adapters = convert_checkpoint(path, loaded)
            files = {ADAPTER_CONFIG: _to_json(config), ADAPTER_WEIGHTS: partial(_save, adapters)}
        elif form == "safetensors":
            files = {SPECIFICATION: _to_json({"format": loaded["format"], "vlm": loaded["vlm"]})}
            files[WEIGHTS] = partial(_save, inference_weights(loaded))
        else:
            files = _make_hugging_face_files(loaded["vlm"], model)
        card = "\n".join(_write_card(loaded, locate(path), form, files))
    return _write_files(Path(folder), {"README.md": f"{card}\n", **files})


def _make_hugging_face_files(about: Metadata, model: nn.Module) -> dict[str, Content]:
    """Returns the files of a model by name."""
    config, tensors = convert_model(model, about.get("origin") or about.get("base_class"))
    if not reads_images_inside_prompts(config):
        return {**_make_description_files(about, config), WEIGHTS: partial(_save, tensors)}
    converted = add_image_token(ImageTextModel(about, config, tensors))
    preprocess = Preprocess.from_state(about["preprocess"])
    images = {} if preprocess.longest_edge else _make_processor_config(preprocess)
    processor = make_processor_files(converted, model, images)
    described = _make_description_files(converted.about, converted.config, processor)
    return {**described, WEIGHTS: partial(_save, converted.tensors)}


def _make_description_files(
    about: Metadata, config: dict[str, Any], processor_files: Mapping[str, str] | None = None
) -> dict[str, str | bytes]:
    """Returns the files other than the weights, by name.

    Args:
        processor_files: Files of the processor of a model that reads images inside its prompts.
    """
    files: dict[str, str | bytes] = {**(processor_files or {})}
    if "preprocess" in about and not files:
        processor = _make_processor_config(Preprocess.from_state(about["preprocess"]))
        files["preprocessor_config.json"] = _to_json(processor)
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
        files["generation_config.json"] = _to_json(
            special | several | first | _make_generation_config(about, prompted=processor_files is not None)
        )
        files |= make_tokenizer_files(tokenizer)
    chat = PromptForm.of(about["form"]).chat if "form" in about else None
    if processor_files is None and isinstance(chat, ChatTemplate):
        files["chat_template.jinja"] = chat.text
    metadata = {name: about[name] for name in ("tokenizer", "preprocess") if name in about}
    return {"config.json": _to_json(config), **files, METADATA: _to_json(metadata)}


def _make_generation_config(about: Metadata, *, prompted: bool) -> dict[str, Any]:
    """Returns decoding options by Hugging Face's names; lengths include the begin token.

    Args:
        prompted: Whether texts continue prompts, which lengths must not include.
    """
    stored: Mapping[str, Any] = about.get("decoding", {})
    options = {entry.name: stored[ours] for ours, entry in OPTIONS.items() if ours in stored and "tokens" not in ours}
    options |= {name: stored[name] for name in ("early_stopping",) if stored.get(name)}
    options |= {"do_sample": True} if stored.get("sample") else {}
    if stored.get("never"):
        options |= {"bad_words_ids": [[token] for token in stored["never"]], "renormalize_logits": True}
    if prompted:
        options |= {"max_new_tokens": int(stored.get("max_tokens", about["max_tokens"]))}
        return options | ({"min_new_tokens": int(stored["min_tokens"])} if stored.get("min_tokens") else {})
    if "max_tokens" in about:  # a model that reads an input
        longest = stored.get("max_tokens", about["max_tokens"])
        options |= {"max_length": int(longest) + 1}
        return options | ({"min_length": int(stored["min_tokens"]) + 1} if stored.get("min_tokens") else {})
    return options | {f"{n}_new_tokens": stored[f"{n}_tokens"] for n in ("min", "max") if f"{n}_tokens" in stored}


def _make_processor_config(preprocess: Preprocess) -> dict[str, Any]:
    """Returns the content of preprocessor_config.json for a preprocessing.

    Raises:
        UserError: No processor of Hugging Face does the same.
    """
    height, width = preprocess.image_size
    inner = {"height": int(height / preprocess.crop), "width": int(width / preprocess.crop)}
    number = {name: number for number, name in RESAMPLINGS.items()}[preprocess.interpolation]
    if preprocess.resize == "pad":
        raise UserError(
            "data.preprocess.resize: pad, with a grey border, has no equivalent in transformers; use --to safetensors"
        )
    shorter = preprocess.resize.startswith("crop")
    if shorter and height != width:
        raise UserError(
            f"data.preprocess.resize: {preprocess.resize} to images of {format_size(preprocess.image_size)} pixels has "
            "no equivalent in transformers; train with squash, or use --to safetensors"
        )
    sides = {"height": height, "width": width}
    crops = shorter or inner != sides
    cut = {"do_center_crop": True, "crop_size": sides} if crops else {}
    scale = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "do_convert_rgb": True}
    means = {"image_mean": list(preprocess.mean), "image_std": list(preprocess.std)}
    kind = "CLIPImageProcessor" if crops else "ViTImageProcessor"
    size = {"shortest_edge": inner["height"]} if shorter else inner
    return {"image_processor_type": kind, "do_resize": True, "size": size, "resample": number, **cut, **scale, **means}


def _to_json(content: Any) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes weights atomically."""
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


def _write_files(folder: Path, files: Mapping[str, Content]) -> list[str]:
    """Writes all files in order; removes all of them if one cannot be written.

    Raises:
        UserError: The folder is not empty, or cannot be written.
    """
    started = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder}: is not empty; choose another folder, or empty it")
        started = True
        for name, content in files.items():
            if callable(content):
                content(folder / name)
            else:
                (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
        return sorted(path.name for path in folder.iterdir())
    except (OSError, RuntimeError) as fault:  # torch raises the latter
        for path in folder.iterdir() if started else ():
            with suppress(OSError):
                path.unlink()
        reason = getattr(fault, "strerror", None) or str(fault).partition("\n")[0]
        raise UserError(f"{folder}: cannot be written ({reason}); choose another folder", 1) from fault
