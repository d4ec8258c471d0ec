"""Tokens of languages: what they add to a tokenizer, and how captions begin with them."""

import pytest
import torch
from caption_data import refusal
from rows import RowSource, open_fields

from vlm.checkpoint.pretrained_tokenizer import PretrainedTokenizer
from vlm.data.fields import CaptionField
from vlm.data.records import LanguageSplit
from vlm.data.text.inputs import OneCaptionField
from vlm.data.text.subwords import BytePairTokenizer
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer, tokenizer_from_state

TEXTS = ["a red circle", "ein rotes Rund", "红色的圆"]
ROWS = [[("a dog", "en"), ("ein Hund", "de")], [("two cats", "en")], [("Katzen", "de"), ("cats", "en")]]


def two_languages(languages=("en", "de")):
    """Captions in two languages."""
    columns = [[list(values) for values in zip(*row, strict=True)] for row in ROWS]
    rows = [{"captions": texts, "references": texts, "languages": names} for texts, names in columns]
    return RowSource({"train": rows, "val": rows}, languages=languages)


def open_field(field, source=None):
    open_fields(source or two_languages(), field)
    return field


@pytest.mark.parametrize("mask, languages", [(False, ["en", "zh"]), (True, ["en", "zh"]), (True, [])])
@pytest.mark.parametrize("kind", [ByteTokenizer, CharTokenizer, SentencePieceTokenizer])
def test_masks_and_languages_are_further_ids_that_no_text_has_and_that_decode_to_nothing(
    kind, mask, languages, tmp_path
):
    plain, own = kind().fit(TEXTS * 9), kind(mask=mask)
    own.add_languages(languages)
    own.fit(TEXTS * 9, cache=tmp_path)
    first = plain.vocab_size
    assert plain.mask_id is None and plain.languages == () and list(plain.language_ids) == plain.begin() == []
    further = [first + place for place in range(len(languages))]
    assert list(own.language_ids) == further and own.vocab_size == first + len(languages) + mask
    assert own.begin() == further[:1] and [own.begin(name) for name in languages] == [[id] for id in further]
    assert own.mask_id == (own.vocab_size - 1 if mask else None)
    for text in (*TEXTS, "<en> <zh> <pad> <mask> [MASK]"):
        assert own.encode(text) == plain.encode(text)
        assert own.decode([*range(first, own.vocab_size), *own.encode(text)]) == plain.decode(plain.encode(text))
    names = [f"<{name}>" for name in (*languages, *["mask"] * mask)]
    assert [own.piece(id) for id in range(first, own.vocab_size)] == names
    again = tokenizer_from_state(own.state())
    assert again.state() == own.state() and again.mask_id == own.mask_id and again.begin() == own.begin()
    assert again.fingerprint == own.fingerprint != plain.fingerprint


def test_a_tokenizer_that_has_learned_takes_further_languages():
    tokenizer = CharTokenizer().fit(TEXTS)
    tokenizer.add_languages(["de", "en"])
    tokenizer.add_languages(["en", "zh"])
    assert tokenizer.languages == ["de", "en", "zh"] and tokenizer.piece(tokenizer.begin("zh")[0]) == "<zh>"


def test_a_vocabulary_of_others_takes_languages():
    pieces = ["<|endoftext|>", *(chr(code) for code in range(33, 127))]
    options = {"pad": 0, "bos": 0, "eos": 0, "merges": [], "prefix_space": False}
    tokenizer = BytePairTokenizer.of(pieces, special=[0], **options)
    tokenizer.add_languages(["de"])
    again = tokenizer_from_state(tokenizer.state())
    assert again.begin() == [len(pieces)] and again.decode([len(pieces), *again.encode("ab")]) == "ab"


def test_the_tokenizer_of_a_checkpoint_takes_languages(pytestconfig):
    path = pytestconfig.rootpath / "tests" / "checkpoint" / "files" / "captioning.ckpt"
    tokenizer, plain = PretrainedTokenizer(path=str(path)), PretrainedTokenizer(path=str(path)).fit([])
    tokenizer.add_languages(["en", "de"])
    tokenizer.fit([])
    assert tokenizer.vocab_size == plain.vocab_size + 2 and tokenizer.languages == ["en", "de"]
    assert tokenizer.begin("de") == [plain.vocab_size + 1]
    assert tokenizer_from_state(tokenizer.state()).begin("de") == tokenizer.begin("de")


def test_an_unknown_language_is_one_line():
    tokenizer = ByteTokenizer()
    assert "--language fr: this model has no language tokens" in refusal(tokenizer.begin, "fr")
    tokenizer.add_languages(["en", "de"])
    assert "--language fr: not supported by this model; choose from en, de" in refusal(tokenizer.begin, "fr")


def test_a_caption_begins_with_its_language_which_is_read_and_not_predicted():
    field = open_field(CaptionField(tokenizer=CharTokenizer(), max_len=6))
    bos, eos, ids = field.tokenizer.bos_id, field.tokenizer.eos_id, field.tokenizer.encode
    (en,), (de,) = field.tokenizer.begin("en"), field.tokenizer.begin("de")
    record = two_languages().split("train").record(0)
    rows = field.collate([field.encode(record, (0, 0, 0))])
    row = [bos, en, *ids("a d"), eos, bos, de, *ids("ein"), eos]
    assert rows.tokens.tolist() == [row] and field.length(record) == len(row) == 12
    assert rows.targets.places.tolist() == [1, 2, 3, 4, 7, 8, 9, 10]
    assert rows.targets.labels.tolist() == [*ids("a d"), eos, *ids("ein"), eos]


def test_evaluation_knows_the_references_of_each_language():
    field = open_field(CaptionField(tokenizer=CharTokenizer(), max_len=9))
    split = field.view("val", two_languages().split("val"), training=False)
    rows = field.collate([field.encode(record, None) for record in split.records()])
    assert rows.references_in("en") == [["a dog"], ["two cats"], ["cats"]]
    assert rows.references_in("de") == [["ein Hund"], [], ["Katzen"]]
    assert rows.references_in(None) == [[text for text, _ in row] for row in ROWS]
    assert torch.equal(rows.partners.tokens[0], rows.tokens[1])
    train = LanguageSplit(two_languages().split("train"), "de")
    assert [record["captions"] for record in train.records()] == [["ein Hund"], [], ["Katzen"]]


def test_captions_of_no_stated_language_are_of_the_first_one():
    field = open_field(CaptionField(tokenizer=CharTokenizer(), max_len=9), two_languages(()))
    state = open_field(CaptionField(tokenizer=CharTokenizer(), max_len=9)).state()
    plain = field.encode_caption("a dog")
    field.restore(state)
    assert field.encode_caption("a dog") == [
        plain[0],
        *field.tokenizer.begin("en"),
        *field.tokenizer.encode("a dog"),
        plain[-1],
    ]


def test_languages_that_a_checkpoint_does_not_know_are_refused():
    field, plain = open_field(CaptionField(tokenizer=ByteTokenizer(), max_len=9)), ByteTokenizer()
    assert "unnamed" in refusal(field.restore, {"tokenizer": plain.state()})
    plain.add_languages(["en", "zh"])
    message = refusal(field.restore, {"tokenizer": plain.state()})
    assert "has no language de; its languages are en, zh" in message


def test_an_encoder_reads_captions_of_all_languages_alike():
    field = open_field(OneCaptionField(tokenizer=CharTokenizer(), max_len=9))
    assert field.tokenizer.languages == ()
