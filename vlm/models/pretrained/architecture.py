"""Describes a model_type of Hugging Face: its stacks, its models in terms of ours, and their heads."""

import importlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.pretrained.fields import Entry, Fields
from vlm.models.pretrained.stack import Names, Part, Spec, WeightMap
from vlm.untrusted.sizes import JsonValue

# Modules in `architectures`, one per family, and the model types that their ARCHITECTURES define.
FAMILIES = {
    "bert": ("bert", "distilbert", "roberta", "xlm_roberta"),
    "captioners": ("blip", "git", "trocr", "vision_encoder_decoder"),
    "dual_encoders": ("clip", "clip_vision_model", "siglip", "siglip_vision_model"),
    "language_models": ("gemma", "gpt2", "llama", "qwen2", "qwen3"),
    "text_to_text": ("marian", "t5"),
    "vision": ("deit", "dinov2", "timm", "vit"),
    "vision_language": ("idefics3", "llava", "paligemma", "smolvlm"),
}
MODULES = {name: module for module, names in FAMILIES.items() for name in names}
MAX_CLASSES = 2**20  # maximum number of classes
Export = tuple[dict[str, JsonValue], dict[str, Tensor]]  # content of config.json, and tensors


class Model(NamedTuple):
    """A complete Hugging Face model in terms of ours.

    Args:
        task: Task of the model.
        build: Returns our model's specification, from config.json and the specifications of its parts.
    """

    task: str
    build: Callable[[Fields, Mapping[str, Spec]], Spec]


LANGUAGE_MODEL = Model("language_modeling", lambda config, parts: parts["decoder"])


@dataclass(frozen=True)
class ImageText:
    """The form of an image in a model's prompts.

    Args:
        id_name: Field of config.json with the id of the token that represents a state of an image.
        before, after: Text before and after the states of an image.
        tile: Text before the states of a square that is cut out of an image, formatted with its row and column.
        starts: Whether prompts begin with the tokenizer's `starts`.
        form: A prompt, with IMAGE and "{}" for the instruction; None if a chat template defines it.
        caption, question: Instructions for a caption and for an answer, the latter with "{}" for the question.
    """

    id_name: str
    before: str = ""
    after: str = ""
    tile: str = ""
    starts: bool = True
    form: str | None = None
    caption: str = "Describe this image in one sentence."
    question: str = "{}"


BERT_SPECIAL_TOKENS = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]"}
IMAGE = "<image>"  # in a prompt it represents the image, in a vocabulary each of its states


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model_type.

    Args:
        parts: Returns the stacks that a config.json describes, by their place in our models, such as "encoder".
        models: Complete models by the name of their Hugging Face class.
        heads: By class of our model: a function that returns the names of the tensors outside the stacks.
        adjust: Changes the weights of all stacks, given the names of a folder's tensors.
        generation: Reads decoding options from config.json; by default they are read from generation_config.json.
        added_tokens: Pieces that its own code appends to a vocabulary that lacks them.
        unused: Tensors outside the stacks that folders may hold and a model may not need, such as heads of other tasks;
            as `list_patterns` yields.
        renamed: Patterns of tensor names in folders of other versions, with the names used here.
        modules: Patterns of the names used here, with the names of the modules of today's transformers.
        image: Form of an image in prompts, for a model that reads images inside its text.
        special_tokens: Pieces for padding, begin and end, if they are not BERT's and the config defines none.
        canonical: Whether texts are converted to lower case and stripped of punctuation.
        text_end_id: Field of text_config with the id of the token whose state represents a text; 2, the value of old
            folders, means the last id of the vocabulary.
        omits_bos: Whether an encoder reads texts without a begin token.
        supports_pairs: Whether pairs of texts are supported, in one row as in BERT.
        neutral_keys: Keys at the top level of config.json that change nothing, besides those of its stacks.
        export: Converts our model to one of theirs; returns None for a model of another kind.
    """

    parts: Callable[[Fields], Mapping[str, Part]]
    models: Mapping[str, Model] = field(default_factory=dict)
    heads: Mapping[type, Callable[[Any], Names]] = field(default_factory=dict)
    adjust: Callable[[WeightMap, Collection[str]], WeightMap] = lambda weights, stored: weights
    generation: Callable[[Fields], Fields] | None = None
    added_tokens: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    modules: tuple[tuple[str, str], ...] = ()
    image: ImageText | None = None
    special_tokens: Mapping[str, str] = field(default_factory=lambda: BERT_SPECIAL_TOKENS)
    canonical: bool = False
    text_end_id: Entry | None = None
    omits_bos: bool = False
    supports_pairs: bool = True
    neutral_keys: tuple[str, ...] = ()
    export: Callable[[nn.Module], Export | None] = lambda model: None

    def rename(self, name: str) -> str:
        """Returns the name that is used here of a tensor in a folder of another version."""
        for pattern, new in self.renamed:
            name = re.sub(pattern, new, name)
        return name


def list_model_types() -> list[str]:
    return sorted(MODULES)


def load_architecture(name: str) -> Architecture:
    """Loads the architecture of a model type."""
    return importlib.import_module(f"vlm.models.pretrained.architectures.{MODULES[name]}").ARCHITECTURES[name]


def find_architecture(config: Fields) -> Architecture:
    """Finds the architecture of a config.json.

    Raises:
        UserError: It is not supported.
    """
    model_type, supported = config.values.get("model_type"), list_model_types()
    if model_type is None and "pretrained_cfg" in config:
        model_type = "timm"  # timm's configs have no model_type
    name = str(model_type).replace("-", "_")
    if name not in supported:
        raise UserError(
            f"{Path(config.file).parent}: model_type {model_type!r:.40} is not supported; supported are "
            f"{', '.join(supported)}"
        )
    return load_architecture(name)


def make_spec(name: str, /, **args: Any) -> Spec:
    """Returns the specification of a class with its arguments, as checkpoints store it."""
    return {"name": name, "args": args}


def specify_captioner(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    """Specifies an image encoder with a decoder that cross-attends to its states or takes them as a prefix."""
    encoder, decoder = parts["encoder"], parts["decoder"]
    if "prefix" not in decoder["args"]:
        decoder["args"]["context_dim"] = encoder["args"]["dim"]
    return make_spec("VisionLanguageModel", encoder=encoder, decoder=decoder)


def specify_translator(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    """Specifies a text encoder with a decoder that cross-attends to its states."""
    parts["decoder"]["args"]["context_dim"] = parts["encoder"]["args"]["dim"]
    return make_spec("TextToText", **parts)


def specify_classifier(config: Fields, parts: Mapping[str, Spec], *, pool: str) -> Spec:
    """Specifies an image classifier with this pooling."""
    return make_spec("Classifier", encoder=parts["encoder"], num_classes=count_exclusive_classes(config), pool=pool)


def name_class_head(model: Classifier, *, pool: str) -> Names:
    """Returns the name of the head, if our model pools like theirs."""
    return {"head": "classifier"} if model.pool == pool else {}


def count_exclusive_classes(config: Fields) -> int:
    """Returns the number of classes of which each input has exactly one, so that a softmax gives their probabilities.

    Raises:
        UserError: The model was trained for several labels per input or for regression. A single output is regression
            in `transformers`, whose pipelines apply a sigmoid to it.
    """
    if config.get("problem_type") not in (None, "single_label_classification"):
        raise config.error("problem_type", "which is not single-label classification")
    names = read_class_names(config)
    if len(names) == 1:
        key = "id2label" if "id2label" in config else "num_labels"
        raise config.error(key, "a single output, which means regression, not classification")
    return len(names)


def read_class_names(config: Fields) -> list[str]:
    """Returns the names of a classifier's classes, in the order of its outputs.

    Raises:
        UserError: They are not numbered from 0, or their number is out of range.
    """
    count = config.get("num_labels", 2)
    if "id2label" not in config:
        if type(count) is not int or not 1 <= count <= MAX_CLASSES:
            raise config.error("num_labels", f"not an integer from 1 to {MAX_CLASSES}")
        return [f"LABEL_{n}" for n in range(count)]
    labels = config.part("id2label").values
    names = [labels.get(str(n)) for n in range(len(labels))]
    if not names or not all(isinstance(name, str | int) for name in names):
        raise config.error("id2label", "which does not number the classes from 0")
    return [str(name) for name in names]
