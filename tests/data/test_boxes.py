"""Boxes as location tokens: coordinates, and what a model wrote, read back."""

import math
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from vlm.data.boxes import ImageBoxes, LabeledBox, LocationCodec, parse_objects
from vlm.data.fields import learn_tokenizers
from vlm.data.images.augment import Augment
from vlm.data.shapes.scene_grounding import GroundedConversations
from vlm.data.text.conversation_field import ConversationField
from vlm.data.text.hugging_face import make_tokenizer_files
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.tasks.image_questions.train import refuse_moved_boxes


def tokenizer(locations: int = 65) -> ByteTokenizer:
    made = ByteTokenizer()
    made.add_locations(locations)
    return made


@pytest.mark.parametrize("size", [(64, 64), (48, 32)])
def test_one_token_per_pixel_edge_keeps_whole_pixels(size) -> None:
    codec, rng = LocationCodec((64, 64), 65, 64), np.random.default_rng(0)
    for _ in range(50):
        left, top = (int(side) for side in rng.integers(0, 60, 2))
        box = (float(left), float(top), float(rng.integers(left + 1, 65)), float(rng.integers(top + 1, 65)))
        assert codec.decode(codec.encode(box)) == box
    coarse = LocationCodec(size, 11, 10)  # Pix2Seq's: round(x / side * (bins - 1))
    box = (3.0, 7.0, 30.0, 29.5)
    numbers = coarse.encode(box)
    assert numbers == [
        round(edge / size[at % 2] * 10) for at, edge in zip((1, 0, 1, 0), (7.0, 3.0, 29.5, 30.0), strict=True)
    ]
    error = np.abs(np.subtract(coarse.decode(numbers), box))
    assert (error <= [size[0] / 20, size[1] / 20] * 2).all()


def test_paligemma_divides_by_the_number_of_tokens() -> None:
    codec = LocationCodec((224, 224), 1024, 1024)
    assert codec.decode([256, 512, 768, 1023]) == (112.0, 56.0, 1023 * 224 / 1024, 168.0)
    assert codec.encode((0.0, 0.0, 224.0, 224.0)) == [0, 0, 1023, 1023]


def encode_text(text: str, made: ByteTokenizer) -> list[int]:
    """Token ids of a text in which <12> is a location token."""
    ids: list[int] = []
    for part in text.replace("<", "\0<").replace(">", "\0").split("\0"):
        ids += [made.location_ids[int(part[1:])]] if part.startswith("<") else made.encode(part)
    return ids


VALID = "<1><2><3><4>cat"
CASES = [
    (VALID, [("cat", (1, 2, 3, 4))]),
    (f"{VALID}<5><6><7><8>red dog", [("cat", (1, 2, 3, 4)), ("red dog", (5, 6, 7, 8))]),
    ("<1><2><3><4> cat ; <5><6><7><8> red dog ;", [("cat", (1, 2, 3, 4)), ("red dog", (5, 6, 7, 8))]),  # PaliGemma's
    ("", []),
    ("cat", [None]),
    (f"cat{VALID}", [None, ("cat", (1, 2, 3, 4))]),
    (f" ; {VALID}", [("cat", (1, 2, 3, 4))]),
    ("<1><2><3>cat", [None]),
    ("<1><2><3><4><5>cat", [None]),
    ("<1><2><3><4>", [None]),
    ("<1><2><3><4> ; ", [None]),
    (f"<1><2><3>dog{VALID}", [None, ("cat", (1, 2, 3, 4))]),
    ("<3><2><3><4>cat", [None]),  # no height
    ("<1><4><3><2>cat", [None]),  # inverted
]


@pytest.mark.parametrize(("text", "objects"), CASES)
def test_objects_are_read_back_and_others_are_counted(text, objects) -> None:
    made = tokenizer()
    ids = encode_text(text, made)
    found = list(parse_objects(made, made.location_ids, ids, [0.0] * len(ids)))
    assert [item and (item.label, item.numbers) for item in found] == objects


def test_a_score_is_the_product_of_class_and_location_probabilities() -> None:
    made = tokenizer()
    ids = encode_text("<1><2><3><4> ab ; <5><6><7><8>c", made)
    rng = np.random.default_rng(0)
    probabilities = rng.uniform(0.2, 1, len(ids))
    first, second = parse_objects(made, made.location_ids, ids, np.log(probabilities).tolist())
    # The class " ab" with its space counts, " ; " does not.
    assert math.exp(first.logprob) == pytest.approx(probabilities[:7].prod())
    assert math.exp(second.logprob) == pytest.approx(probabilities[10:].prod())


@pytest.mark.parametrize("kind", [ByteTokenizer, CharTokenizer, SentencePieceTokenizer])
def test_location_tokens_are_the_last_ids_but_the_mask_and_are_stored(kind) -> None:
    made = kind(mask=True)
    made.add_languages(["en", "de"])
    made.add_locations(5)
    made.fit(["a red circle", "a blue cross and more"] * 20)
    assert len(made.location_ids) == 5 and made.location_ids[-1] == made.vocab_size - 2 == made.mask_id - 1
    assert [made.piece(id) for id in made.location_ids] == [f"<loc{n:04}>" for n in range(5)]
    assert [*made.language_ids] == [made.location_ids[0] - 2, made.location_ids[0] - 1]
    again = tokenizer_from_state(made.state())
    assert again.location_ids == made.location_ids and again.fingerprint == made.fingerprint
    assert not {*again.encode("<loc0003> a red circle")} & {*again.location_ids}
    plain = kind(mask=True).fit(["a red circle", "a blue cross and more"] * 20)
    assert plain.fingerprint != made.fingerprint and plain.vocab_size == made.vocab_size - 7
    state = made.state()
    state["options"] = state["options"] | {"locations": 10**9}
    with pytest.raises(UserError, match="damaged"):
        tokenizer_from_state(state)


def test_boxes_are_restored_from_json() -> None:
    cat, crowd = LabeledBox("cat", (1.0, 2.0, 3.5, 4.0)), LabeledBox("crowd", (0.0, 0.0, 9.0, 9.0), True)
    boxes = ImageBoxes((40, 30), (cat, crowd))
    plain = [list(boxes.size), [[label, list(box), crowd] for label, box, crowd in boxes.boxes]]
    assert ImageBoxes.of_plain(plain) == boxes
    assert list(map(str, boxes.boxes)) == ["cat 1 2 3.5 4", "crowd 0 0 9 9 (crowd)"]


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", [ByteTokenizer, CharTokenizer, SentencePieceTokenizer])
def test_location_tokens_have_the_same_ids_in_files_for_transformers(kind, mask, tmp_path) -> None:
    made = kind(mask=mask)
    made.add_locations(40)
    made.fit(["a red circle", "a blue cross and more"] * 20)
    for name, content in make_tokenizer_files(made).items():
        (tmp_path / name).write_text(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = [*made.location_ids[3:7], *made.encode("red circle")]
    assert (
        theirs.decode(ids, skip_special_tokens=True)
        == made.decode(ids)
        == "<loc0003><loc0004><loc0005><loc0006>red circle"
    )
    assert theirs("<loc0003><loc0004><loc0005><loc0006>red circle").input_ids == ids and len(theirs) == made.vocab_size


def test_names_of_locations_are_tokens_where_they_are_recognised() -> None:
    made, plain = tokenizer(12), ByteTokenizer()
    text = "at <loc0003><loc0011> and <loc0012> or <loc7>"
    first = made.location_ids[0]
    expected = [*plain.encode("at "), first + 3, first + 11, *plain.encode(" and <loc0012> or <loc7>")]
    assert made.encode_located(text) == expected and made.decode(expected) == text
    assert plain.encode_located(text) == plain.encode(text) == made.encode(text)


def test_conversations_have_location_tokens_and_the_tokenizer_learns_none_of_their_names() -> None:
    options = {
        "shapes": ["circle", "cross"],
        "colors": ["red", "blue", "green"],
        "sizes": ["small", "large"],
        "seed": 0,
    }
    scenes = {"train_scenes": 12, "val_scenes": 4, "test_scenes": 4}
    source = GroundedConversations(**options, **scenes, max_objects=2, bins=65)
    field = ConversationField(tokenizer=CharTokenizer(), max_len=200, bins=65)
    splits = {name: source.split(name) for name in source.splits}
    field.open(source, splits, seed=0, cache=None)
    learn_tokenizers([field], None)
    assert "<" not in "".join(map(field.tokenizer.piece, range(3 + 256, field.tokenizer.location_ids[0])))
    (question,) = (item for item in splits["val"].record(0)["questions"] if item.kind == "grounded")
    row = field.render(question)
    locations = [id for id in row.tokens if id in field.tokenizer.location_ids]
    assert len(locations) == 4 * len(re.findall(r"(?:<loc\d{4}>){4}", question.answer)) > 0
    assert field.tokenizer.decode(row.tokens) == question.text + question.answer
    about = {"tokenizer": field.tokenizer.state(), "form": field.form.state()}
    restored = ConversationField(tokenizer=CharTokenizer(), max_len=200, bins=65)
    restored.open(source, splits, seed=0, cache=None)
    restored.restore(about)
    assert restored.render(question) == row
    with pytest.raises(UserError, match=r"data\.source\.bins=65: needs as many location tokens; set task"):
        ConversationField(tokenizer=CharTokenizer(), max_len=200).open(source, splits, seed=0, cache=None)


@pytest.mark.parametrize("augment", [{"horizontal_flip": True}, {"min_scale": 0.5}])
def test_images_with_boxes_in_texts_are_not_moved(augment) -> None:
    with pytest.raises(UserError, match="boxes in texts do not follow; turn it off"):
        refuse_moved_boxes(Augment(image_size=64, **augment))
    refuse_moved_boxes(Augment(image_size=64, color_jitter=0.2))
    refuse_moved_boxes(None)
