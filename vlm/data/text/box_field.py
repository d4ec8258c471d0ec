"""The field of boxes: what to find in an image, and the objects found, as location tokens and classes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from vlm.data.batch import CaptionRow
from vlm.data.boxes import (
    COORDINATES,
    SEPARATOR,
    BoxPrompt,
    ImageBoxes,
    LabeledBox,
    LocationCodec,
    format_prompt,
    prompt_ids,
    view_codec,
)
from vlm.data.fields import AugmentKey, choose_augment
from vlm.data.images.augment import Augment
from vlm.data.images.class_augment import ClassAugment
from vlm.data.images.image import Preprocess
from vlm.data.images.view import View, box_area
from vlm.data.records import Record, Source, Split, report_error
from vlm.data.text.conversation_field import QuestionField
from vlm.data.text.tokenizer import Tokenizer
from vlm.data.text.tokenizer_base import MAX_LOCATIONS
from vlm.errors import Count, Range, Share, UserError
from vlm.randomness import numpy_rng

Encoded = tuple[list[int], list[bool]]  # token ids, and whether each is predicted


class BoxField(QuestionField):
    r"""The objects of an image after a prompt that asks for some classes, or for all; only objects are predicted.

        begin  detect red circle ; blue cross \n  <loc0012> <loc0030> <loc0025> <loc0043>  red circle  end
               <---------- only read --------->   <- top, left, bottom and right edge -->  <- class ->
                                                  <------------------- predicted ------------------------->

    Objects are in random order (Chen et al. 2022, Pix2Seq), in training another one in each epoch. Edges are those in
    the view that the model reads, augmented as its image is; an object of which too little is seen there is left out.

    Args:
        preprocess, augment, side_words: Those of the images.
        bins: Number of location tokens per side; None for one per pixel edge of the view, at most MAX_LOCATIONS.
        prompts_per_image: Prompts about a training image, each with its objects in another order.
        named: Share of training prompts that name classes: some of the image's and some others.
        min_visible: Smallest share of a box that the view must show.
        others: See CaptionField; objects that do not fit into max_len are left out.
    Attributes:
        classes: Names of the classes.
    """

    needs = ("boxes",)
    classes: Sequence[str] = ()

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        max_len: Annotated[int, Range(8)],
        preprocess: Preprocess,
        augment: Augment | None = None,
        side_words: Sequence[str] = (),
        bins: Annotated[int, Range(2, MAX_LOCATIONS)] | None = None,
        prompts_per_image: Count = 1,
        named: Share = 0.5,
        min_visible: Share = 0.25,
    ) -> None:
        super().__init__(tokenizer=tokenizer, max_len=max_len)
        if isinstance(augment, ClassAugment):
            raise UserError("data.augment: ClassAugment may rotate or shift images and not their boxes; use Augment")
        self.preprocess, self.augment, self.side_words = preprocess, augment, frozenset(side_words)
        self.bins = min(MAX_LOCATIONS, max(preprocess.image_size) + 1) if bins is None else bins
        self.prompts_per_image, self.named, self.min_visible = prompts_per_image, named, min_visible
        self._cut: set[str] = set()  # records with more objects than fit

    def open(self, source: Source, splits: Mapping[str, Split], *, seed: int, cache: Path | None) -> None:
        super().open(source, splits, seed=seed, cache=cache)
        self.classes = list(source.classes)
        self.tokenizer.add_locations(self.bins)

    def prepare(self) -> None:
        """Checks that the tokenizer writes each class as it is.

        Raises:
            UserError: It writes one otherwise, such as in lower case; no written object would then have that class.
        """
        super().prepare()
        for label in self.classes:
            if (written := self.tokenizer.decode(self._label_ids(label)).strip(SEPARATOR)) != label:
                remedy = "use another tokenizer, or rename the class"
                report_error(f"data: the tokenizer writes the class {label!r} as {written!r}; {remedy}")

    def state(self) -> dict[str, Any]:
        return super().state() | {"classes": list(self.classes)}

    def restore(self, about: Mapping[str, Any]) -> None:
        """Restores tokenizer and preprocessing.

        Raises:
            UserError: The checkpoint has no location tokens, or lacks a class of the data.
        """
        super().restore(about)
        self.preprocess = Preprocess.from_state(about["preprocess"])
        if unknown := sorted({*self.classes} - {*about["classes"]}):
            raise UserError(f"data: the checkpoint has no class {unknown[0]!r}; give the data that it was trained on")
        self.classes, self.bins = list(about["classes"]), len(self.tokenizer.location_ids)

    def codec(self) -> LocationCodec:
        """Coordinates of the view as location tokens."""
        return view_codec(self.preprocess.image_size, self.bins)

    def texts(self) -> Iterator[str]:
        yield from (format_prompt(self.classes[at : at + 2]) for at in range(len(self.classes)))
        yield from super().texts()

    def texts_of(self, record: Record) -> Sequence[str]:
        return [item.label for item in record["boxes"].boxes]

    def identity(self, record: Record) -> Sequence[str]:
        return list(map(str, record["boxes"].boxes))

    def references_of(self, record: Record) -> Sequence[ImageBoxes]:  # type: ignore[override]
        return [record["boxes"]]

    def lengths(self, record: Record) -> list[tuple[str, int]]:
        labels = self.texts_of(record)
        objects = sum(COORDINATES + len(self._label_ids(label)) for label in labels)
        return [(" ".join(labels), len(self.prompt_ids(())) + objects + 1)] if labels else []

    def length(self, record: Record) -> int:
        return sum(min(count, self.max_len) for _, count in self.lengths(record)) * self.prompts_per_image

    def prompt_ids(self, classes: Sequence[str]) -> list[int]:
        return prompt_ids(self.tokenizer, classes)

    def encode(self, record: Record, key: AugmentKey | None) -> CaptionRow:
        if key is None:
            return super().encode(record, key)
        augment = choose_augment(self.augment, record, self.side_words)
        size = record["boxes"].size
        seen = self.visible(record["boxes"], self.preprocess.view(size) if augment is None else augment.view(size, key))
        rng = numpy_rng("boxes", *key)
        texts, references = list[Encoded](), list[BoxPrompt]()
        for _ in range(self.prompts_per_image):
            classes = self._choose_classes(seen, rng) if rng.random() < self.named else []
            while len(classes) > 1 and len(self.prompt_ids(classes)) > self.max_len // 2:
                classes.pop()
            chosen = [item for item in seen if not classes or item.label in classes]
            texts.append(self._encode([chosen[at] for at in rng.permutation(len(chosen))], classes, record.id))
            if self.compares:
                answer = [token for token, predicted in zip(*texts[-1], strict=True) if predicted]
                references.append(BoxPrompt(format_prompt(classes), chosen, self.tokenizer.decode(answer)))
        return CaptionRow(texts, references)

    def visible(self, objects: ImageBoxes, view: View) -> list[LabeledBox]:
        """The objects of an image that a view shows, with their boxes in the view; without crowds."""
        found = []
        for item in objects.boxes:
            box = view.map_box(item.box)
            clipped = view.clip_box(box)
            if not item.crowd and box_area(clipped) > max(self.min_visible * box_area(box) * (1 - 1e-9), 0):
                found.append(LabeledBox(item.label, clipped))
        return found

    def _choose_classes(self, seen: Sequence[LabeledBox], rng: Any) -> list[str]:
        """Classes to ask for, in random order: a part of those seen, or none, and as many others or one."""
        present = sorted({item.label for item in seen})
        absent = [name for name in self.classes if name not in present]
        chosen = [present[at] for at in rng.permutation(len(present))[: rng.integers(len(present) + 1)]]
        others = rng.permutation(len(absent))[: max(not chosen, rng.integers(len(chosen) + 1))]
        chosen += [absent[at] for at in others]
        return [chosen[at] for at in rng.permutation(len(chosen))]

    def _row(self, record: Record) -> list[Encoded]:
        """What evaluation reads: all objects that the view shows, in an order determined by the record's id."""
        seen = self.visible(record["boxes"], self.preprocess.view(record["boxes"].size))
        order = numpy_rng("boxes", record.id).permutation(len(seen))
        return [self._encode([seen[at] for at in order], [], record.id)]

    def _encode(self, objects: Sequence[LabeledBox], classes: Sequence[str], id: str) -> Encoded:
        """Token ids of a prompt and of objects in the view; those that do not fit into max_len are left out."""
        prompt, codec, first = self.prompt_ids(classes), self.codec(), self.tokenizer.location_ids.start
        ids: list[int] = []
        for item in objects:
            numbers = codec.encode(item.box)
            if numbers[0] >= numbers[2] or numbers[1] >= numbers[3]:  # thinner than a bin
                numbers = widen(numbers, self.bins)
            more = [*(first + number for number in numbers), *self._label_ids(item.label)]
            if len(prompt) + len(ids) + len(more) + 1 > self.max_len:
                self._cut.add(id)
                self.truncated = len(self._cut)
                break
            ids += more
        answer = [*ids, self.tokenizer.eos_id]
        return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)

    def _label_ids(self, label: str) -> list[int]:
        if label not in self._ids:
            self._ids[label] = self.tokenizer.encode(label)
        return self._ids[label]


def widen(numbers: Sequence[int], bins: int) -> list[int]:
    """A box whose edges have different location tokens: edges that have the same are moved apart by one."""
    top, left, bottom, right = numbers
    if top >= bottom:
        top, bottom = (top, top + 1) if top + 1 < bins else (top - 1, top)
    if left >= right:
        left, right = (left, left + 1) if left + 1 < bins else (left - 1, left)
    return [top, left, bottom, right]
