"""Checks that a teacher reads the inputs of its student and predicts the same outcomes, before training."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vlm.checkpoint.stored import Checkpoint
from vlm.config.tree import Config, select
from vlm.data.fields import Field, ImageField, LabelField
from vlm.data.images.image import Preprocess
from vlm.data.text.prompt_field import PromptField
from vlm.errors import UserError
from vlm.models.decoder import TextDecoder
from vlm.models.recurrent import RecurrentEncoder
from vlm.models.text_encoder import TextEncoder
from vlm.models.word_encoder import WordEncoder
from vlm.tasks.shared.frozen_models import has_tokenizer, read_frozen

KEY = "task.teacher.path"
GEOMETRY = ("image_size", "resize", "interpolation", "crop", "longest_edge", "tiles")  # options of preprocessing


class TeacherFit:
    """A teacher beside the data of its student.

    Args:
        path: The teacher, for messages.
        loaded: Its checkpoint.
        fields: The fields of the student's task.
        config: The student's config, whose files messages name; None if it is unknown.
    """

    def __init__(
        self, path: str, loaded: Checkpoint, fields: Mapping[str, Field], config: Config | None = None
    ) -> None:
        self.path, self.about, self.loaded = path, loaded["vlm"], loaded
        self.fields, self.config = fields, config or Config({})

    def check(self, model: nn.Module) -> None:
        """Checks everything that does not depend on the student's model.

        Args:
            model: The teacher's model.
        Raises:
            UserError: It does not fit; the message names the files of both and what to change.
        """
        self._check_tokenizer()
        self._check_classes()
        self._check_images()
        self._check_texts(model)

    def refuse(self, reason: str) -> UserError:
        """Returns the error about a teacher that does not fit."""
        return UserError(f"{KEY}={self.path}: {reason}")

    def _describe_data(self) -> str:
        """Returns the files of the student's data."""
        places = [select(self.config, f"data.{name}", None) for name in ("root", "path")]
        return " ".join(str(place) for place in places if place) or "its training data"

    def _check_tokenizer(self) -> None:
        fields = self.fields.items()
        name, tokenizer = next(((name, field.tokenizer) for name, field in fields if field.tokenizer), ("", None))
        if tokenizer is None or has_tokenizer(self.loaded, tokenizer):
            return
        place = select(self.config, f"task.fields.{name}.tokenizer.path", None)
        origin = f"of {place}" if place else f"learned from {self._describe_data()}"
        remedy = f"set tokenizer=pretrained tokenizer.path={self.path}, or use a teacher with the same tokenizer"
        raise self.refuse(f"its tokenizer differs from the student's ({origin}); {remedy}")

    def _check_classes(self) -> None:
        labels = self.fields.get("labels")
        if not isinstance(labels, LabelField):
            return
        ours, theirs = list(labels.classes), ["".join(name) for name in self.about.get("classes", ())]
        if ours == theirs:
            return
        data = self._describe_data()
        at = next((n for n, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        what = f"has {len(theirs)} classes, the student's data ({data}) {len(ours)}"
        if at is not None:
            what = f"class {at} is {theirs[at]!r:.60}, in the student's data ({data}) {ours[at]!r:.60}"
        raise self.refuse(f"{what}; use a teacher of the same classes in the same order")

    def _check_images(self) -> None:
        images = self.fields.get("images")
        if not isinstance(images, ImageField):
            return
        if "preprocess" not in self.about:
            raise self.refuse("has no preprocessing of images; use a teacher that reads images")
        sides = (images.preprocess.state(), Preprocess.from_state(self.about["preprocess"]).state())
        for name in GEOMETRY:
            own, value = (side.get(name) for side in sides)
            if own != value:
                key = "data.image_size" if name == "image_size" else f"data.preprocess.{name}"
                what = f"was trained on images with {name}={value}, the student's have {own}"
                raise self.refuse(f"{what}; set {key}={value}, or use a teacher of such images")

    def _check_texts(self, model: nn.Module) -> None:
        readers = [
            part
            for part in model.modules()
            if isinstance(part, TextDecoder | TextEncoder | RecurrentEncoder | WordEncoder)
        ]
        for name, field in self.fields.items():
            longest, state = getattr(field, "max_len", 0), field.state()
            if short := [reader.max_len for reader in readers if reader.max_len < longest]:
                what = f"reads at most {min(short)} tokens, but task.fields.{name}.max_len is {longest}"
                raise self.refuse(f"{what}; set data.max_len={min(short)}")
            theirs: Any = self.about.get("pairs")
            if "pairs" in state and theirs not in (None, state["pairs"]):
                kinds = ("single texts", "pairs of texts")
                remedy = "use a teacher of the same kind of texts"
                raise self.refuse(f"reads {kinds[theirs]}, the student {kinds[state['pairs']]}; {remedy}")
            if isinstance(field, PromptField) and state.get("form") != self.about.get("form"):
                raise self.refuse("has another form of prompts than the student; use a teacher of the same family")


def check_teacher(path: str, fields: Mapping[str, Field], config: Config) -> None:
    """Checks that a teacher fits the data of a training, for `vlm check-data`; see `TeacherFit`.

    Raises:
        UserError: It cannot be read, or does not fit.
    """
    loaded, model = read_frozen(path)
    TeacherFit(path, loaded, fields, config).check(model)
