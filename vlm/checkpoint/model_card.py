"""The model card of an export: its README.md."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vlm.checkpoint.load import weights
from vlm.checkpoint.stored import interpolated
from vlm.config.tree import resolve
from vlm.io.shell import shell_line
from vlm.nn.image_size import shown

PIPELINES = {
    "captioning": "image-to-text",
    "classification": "image-classification",
    "contrastive": "zero-shot-image-classification",
    "language_modeling": "text-generation",
    "translation": "translation",
}
USE = {
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


def _graph_use(package: str, opened: str) -> list[str]:
    return [
        *("import json", f"import {package}", ""),
        'about = json.load(open(f"{folder}/graphs.json"))  # inputs, outputs, images, special tokens, classes',
        'files = {name: graph["file"] for name, graph in about["graphs"].items()}',
        "graphs = {name: " + opened.format('f"{folder}/{file}"') + " for name, file in files.items()}",
    ]


# For the other forms.
OTHER_USE = {
    "safetensors": ["import vlm", "", "model = vlm.load(folder)"],
    "onnx": _graph_use("onnxruntime", "onnxruntime.InferenceSession({})"),
    "pt2": _graph_use("torch", "torch.export.load({}).module()"),
}


def model_card(loaded: Mapping[str, Any], path: Path, *, form: str) -> str:
    """The card of a checkpoint: use, data, training, scores, sizes, limits.

    Args:
        path: The checkpoint, in the folder of its run if there is one.
        form: Form of the export.
    """
    return "\n".join(_lines(loaded, path, form)) + "\n"


def _lines(loaded: Mapping[str, Any], path: Path, form: str) -> Iterator[str]:
    about = loaded["vlm"]
    task, pipeline = str(about["task"]), PIPELINES.get(about["task"])
    library = {"huggingface": "transformers", "safetensors": "vlm-lightning", "pt2": "pytorch"}.get(form, form)
    yield from ("---", f"library_name: {library}", *([f"pipeline_tag: {pipeline}"] if pipeline else []), "---", "")
    yield from (f"# A model for {task.replace('_', ' ')}", "", "Trained and exported by vlm.", "", "## Use", "")
    use = ["import transformers", "", USE[task]] if form == "huggingface" else OTHER_USE[form]
    yield from ("```python", *use, "```", "")
    yield from ("## Data and training", "", *_training(loaded), "")
    yield from ("## Scores", "", *_scores(about, path), "")
    yield from ("## Sizes", "", *_sizes(loaded), "")
    yield from ("## Limits", "", *_limits(about))


def _training(loaded: Mapping[str, Any]) -> Iterator[str]:
    about = loaded["vlm"]
    if "config" not in about:
        yield f"Weights of a {about.get('origin', 'model')} of Hugging Face, whose own card has them."
        return
    config = resolve(interpolated(about["config"]))
    source = config["data"]["source"]
    yield f"- data: {source['_class_']}, fingerprint `{about.get('data')}`; their licence is not recorded"
    yield f"- run: {config['name']}, task {config['task_name']}{_command(about.get('typed'))}"
    yield f"- steps: {loaded.get('global_step', 0):,}, epochs begun: {loaded.get('epoch', -1) + 1}"
    for group in ("optim", "schedule"):
        values = {key: value for key, value in config[group].items() if not isinstance(value, dict | list)}
        yield f"- {group}: " + ", ".join(f"{key.strip('_')} {value}" for key, value in values.items())
    yield f"- batch: {config['data'].get('batch_size')} samples, seed {config['seed']}"


def _command(typed: Any) -> str:
    """The command that started the run, as an indented block; empty for older checkpoints, which do not store it."""
    if not isinstance(typed, list):
        return ""
    public = (re.sub(r"(^|=)['\"]?/.*/", r"\1.../", str(text)) for text in typed)  # hides the user's name in paths
    return f"; it was started with\n\n      {shell_line(['vlm', 'train', *public])}\n"


def _scores(about: Mapping[str, Any], path: Path) -> Iterator[str]:
    """Yields the table of scores: of the run's evaluation if it lies beside the checkpoint, else of the file."""
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
        yield f"| {name} | " + " | ".join("" if one is None else f"{one:.4f}" for one in cells) + " |"


def _sizes(loaded: Mapping[str, Any]) -> Iterator[str]:
    about, tensors = loaded["vlm"], weights(loaded)
    yield f"- parameters: {sum(tensor.numel() for tensor in tensors.values()):,}"
    if "preprocess" in about:
        yield f"- images: {shown(about['preprocess']['image_size'])} pixels"
    if "max_tokens" in about:
        yield f"- texts: up to {about['max_tokens']} tokens"
    if "classes" in about:
        yield f"- classes: {len(about['classes'])}"


def _limits(about: Mapping[str, Any]) -> Iterator[str]:
    yield "- It knows what its training data show, and no more; other images and texts get answers all the same."
    yield "- Its probabilities are not calibrated for other data. Try it on your own before you rely on it."
    if about.get("origin"):
        yield "- The limits of the weights that it started from hold too."
