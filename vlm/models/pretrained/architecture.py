"""A model_type of Hugging Face: its stacks, the models of ours that it gives, their heads. Each is a module."""

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from vlm.errors import UserError
from vlm.models.pretrained.fields import Fields
from vlm.models.pretrained.stack import Names, Part, WeightMap

FOLDER = Path(__file__).parent / "architectures"
CLASSES = 2**20  # at most
Spec = dict[str, Any]
Export = tuple[dict[str, Any], dict[str, Tensor]]  # the content of config.json, and tensors


class Model(NamedTuple):
    """A complete model of theirs as one of ours.

    Args:
        task: The task that it is for.
        build: Its specification, of config.json and those of its parts.
    """

    task: str
    build: Callable[[Fields, Mapping[str, Spec]], Spec]


@dataclass(frozen=True)
class ImageText:
    """How prompts of a model show an image.

    Args:
        id_name: Field of config.json with the id of the token that stands for a state.
        before, after: What stands around the states of an image.
        tile: What stands before the states of a square that is cut out of it, with its row and column.
        starts: Whether what the tokenizer puts before a text stands before a prompt.
        form: A prompt, with IMAGE and "{}" for the instruction; None if a chat template says it.
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


BERT_ENDS = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]"}
IMAGE = "<image>"  # stands in a prompt for the image, in a vocabulary for each of its states


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model_type.

    Args:
        parts: Of config.json, the stacks by their place in ours, "encoder" and "decoder".
        models: Complete models, by the names of their classes.
        heads: Names of the tensors around the stacks of a model of ours, by its class; of the model.
        adjust: Change to all weights; of them and the names that a folder has.
        generation: Options of decoding, of config.json; by default generation_config.json has them.
        added: Pieces that its own code adds at the end of a vocabulary which lacks them.
        renamed: Patterns of tensors' names in folders of other versions, with their names here.
        image: How prompts show an image, for a model that reads images inside its text.
        ends: Pieces that fill a row, begin a text and end it, where they are not BERT's and no decoder says them.
        canonical: Whether texts are read in lower case and without punctuation.
        bare: Whether an encoder reads texts without a token before them.
        pairs: Whether a text and a second one are put into a row as BERT does it; False if they cannot be read.
        export: A model of ours as one of theirs; None for a model that is of another kind.
    """

    parts: Callable[[Fields], Mapping[str, Part]]
    models: Mapping[str, Model] = field(default_factory=dict)
    heads: Mapping[type, Callable[[Any], Names]] = field(default_factory=dict)
    adjust: Callable[[WeightMap, Collection[str]], WeightMap] = lambda weights, stored: weights
    generation: Callable[[Fields], Fields] | None = None
    added: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    image: ImageText | None = None
    ends: Mapping[str, str] = field(default_factory=lambda: BERT_ENDS)
    canonical: bool = False
    bare: bool = False
    pairs: bool = True
    export: Callable[[nn.Module], Export | None] = lambda model: None


def known_architectures() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("[a-z]*.py"))


def load_architecture(name: str) -> Architecture:
    """The architecture of a module's name."""
    return importlib.import_module(f"vlm.models.pretrained.architectures.{name}").ARCHITECTURE


def architecture_of(config: Fields) -> Architecture:
    """The architecture of a config.json.

    Raises:
        UserError: There is no module for it.
    """
    model_type, known = config.values.get("model_type"), known_architectures()
    if model_type is None and "pretrained_cfg" in config:
        model_type = "timm"  # which has no name for it
    name = str(model_type).replace("-", "_")
    if name not in known:
        raise UserError(
            f"{Path(config.file).parent} holds a model of type {model_type!r:.40}; what can be read is "
            f"{', '.join(known)}"
        )
    return load_architecture(name)


def spec_of(name: str, /, **args: Any) -> Spec:
    """The specification of a class with its arguments, as checkpoints have it."""
    return {"name": name, "args": args}


def captioner(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    """An encoder of images with a decoder that attends to its states, unless it takes them as a prefix."""
    encoder, decoder = parts["encoder"], parts["decoder"]
    if "prefix" not in decoder["args"]:
        decoder["args"]["context_dim"] = encoder["args"]["dim"]
    return spec_of("VisionLanguageModel", encoder=encoder, decoder=decoder)


def translator(config: Fields, parts: Mapping[str, Spec]) -> Spec:
    """An encoder of texts with a decoder that attends to its states."""
    parts["decoder"]["args"]["context_dim"] = parts["encoder"]["args"]["dim"]
    return spec_of("TextToText", **parts)


def classifier(pool: str) -> Callable[[Fields, Mapping[str, Spec]], Spec]:
    """A classifier of images by the states that its head reads."""

    def build(config: Fields, parts: Mapping[str, Spec]) -> Spec:
        return spec_of("Classifier", encoder=parts["encoder"], num_classes=len(class_names(config)), pool=pool)

    return build


def class_names(config: Fields) -> list[str]:
    """The names of a classifier's classes, in the order of its outputs.

    Raises:
        UserError: They are not texts, numbered from 0 on.
    """
    count = config.values.get("num_labels", 2)
    if "id2label" not in config:
        if type(count) is not int or not 1 <= count <= CLASSES:
            raise config.fault("num_labels", f"not a whole number from 1 to {CLASSES}")
        return [f"LABEL_{n}" for n in range(count)]
    labels = config.part("id2label").values
    names = [labels.get(str(n)) for n in range(len(labels))]
    if not names or not all(isinstance(name, str | int) for name in names):
        raise config.fault("id2label", "which does not name the classes from 0 on")
    return [str(name) for name in names]
