"""Tokens of languages: what they add to a tokenizer, and how captions begin with them."""

import pytest
import torch
from captioned import refusal

from vlm.checkpoint.pretrained_tokenizer import PretrainedTokenizer
from vlm.data.batch import IGNORE, next_token_labels
from vlm.data.fields import CaptionField, learn_tokenizers
from vlm.data.records import InLanguage, Listed, Record, Source
from vlm.data.text.one_caption_field import OneCaptionField
from vlm.data.text.subwords import BytePairTokenizer
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer, tokenizer_from_state

TEXTS = ["a red circle", "ein rotes Rund", "红色的圆"]
ROWS = [[("a dog", "en"), ("ein Hund", "de")], [("two cats", "en")], [("Katzen", "de"), ("cats", "en")]]


class Told(Source):
    """Captions in two languages."""

    splits = ("train", "val")
    languages = ("en", "de")

    def open(self, name):
        def record(row, epoch):
            texts, languages = (list(values) for values in zip(*row[1], strict=True))
            return Record(f"{row[0]}", {"captions": texts, "references": texts, "languages": languages})

        return Listed(list(enumerate(ROWS)), record)


class Plain(Told):
    languages = ()


def opened(field, source=None):
    source = source or Told()
    field.open(source, {name: source.split(name) for name in source.splits}, seed=0, cache=None)
    learn_tokenizers([field], None)
    field.prepare()
    return field


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("kind", [ByteTokenizer, CharTokenizer, SentencePieceTokenizer])
def test_languages_are_further_ids_that_no_text_has_and_that_decode_to_nothing(kind, mask, tmp_path):
    plain, own = kind(mask=mask).fit(TEXTS * 9), kind(mask=mask)
    own.add_languages(["en", "zh"])
    own.fit(TEXTS * 9, cache=tmp_path)
    first = plain.vocab_size - mask
    assert plain.languages == () and list(plain.language_ids) == plain.begin() == []
    assert list(own.language_ids) == [first, first + 1] and own.vocab_size == plain.vocab_size + 2
    assert own.begin() == own.begin("en") == [first] and own.begin("zh") == [first + 1]
    assert own.mask_id == (own.vocab_size - 1 if mask else None)
    for text in (*TEXTS, "<en> <zh> <pad>"):
        assert own.encode(text) == plain.encode(text)
        assert own.decode([*own.begin("zh"), *own.encode(text)]) == plain.decode(plain.encode(text))
    assert own.piece(first) == "<en>"
    again = tokenizer_from_state(own.state())
    assert again.begin("zh") == own.begin("zh") and again.state() == own.state()
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
    assert "--language fr: unknown to this model; choose from en, de" in refusal(tokenizer.begin, "fr")


def test_a_caption_begins_with_its_language_which_is_read_and_not_predicted():
    field = opened(CaptionField(tokenizer=CharTokenizer(), max_len=6))
    bos, eos, ids = field.tokenizer.bos_id, field.tokenizer.eos_id, field.tokenizer.encode
    (en,), (de,) = field.tokenizer.begin("en"), field.tokenizer.begin("de")
    record = Told().split("train").record(0)
    rows = field.collate([field.encode(record, (0, 0, 0))])
    row = [bos, en, *ids("a d"), eos, bos, de, *ids("ein"), eos]
    assert rows.tokens.tolist() == [row] and field.length(record) == len(row) == 12
    labels = next_token_labels(rows.tokens, rows.segments)[0].tolist()
    assert labels[0] == en and labels[6] == de
    expected = [IGNORE if label in (en, de) else label for label in labels]
    places = [place for place, label in enumerate(expected) if label != IGNORE]
    assert rows.targets.places.tolist() == places and len(places) == 8
    assert rows.targets.labels.tolist() == [expected[place] for place in places]


def test_evaluation_knows_the_references_of_each_language():
    field = opened(CaptionField(tokenizer=CharTokenizer(), max_len=9))
    split = field.view("val", Told().split("val"), training=False)
    rows = field.collate([field.encode(record, None) for record in split.records()])
    assert rows.references_in("en") == [["a dog"], ["two cats"], ["cats"]]
    assert rows.references_in("de") == [["ein Hund"], [], ["Katzen"]]
    assert rows.references_in(None) == [[text for text, _ in row] for row in ROWS]
    assert torch.equal(rows.others.tokens[0], rows.tokens[1])
    train = InLanguage(Told().split("train"), "de")
    assert [record["captions"] for record in train.records()] == [["ein Hund"], [], ["Katzen"]]


def test_captions_of_no_stated_language_are_of_the_first_one():
    field = opened(CaptionField(tokenizer=CharTokenizer(), max_len=9), Plain())
    state = opened(CaptionField(tokenizer=CharTokenizer(), max_len=9)).state()
    plain = field.ids("a dog")
    field.restore(state)
    assert field.ids("a dog") == [plain[0], *field.tokenizer.begin("en"), *field.tokenizer.encode("a dog"), plain[-1]]


def test_languages_that_a_checkpoint_does_not_know_are_refused():
    field, plain = opened(CaptionField(tokenizer=ByteTokenizer(), max_len=9)), ByteTokenizer()
    assert "unnamed" in refusal(field.restore, {"tokenizer": plain.state()})
    plain.add_languages(["en", "zh"])
    message = refusal(field.restore, {"tokenizer": plain.state()})
    assert "does not know de; its languages are en, zh" in message


def test_an_encoder_reads_captions_of_all_languages_alike():
    field = opened(OneCaptionField(tokenizer=CharTokenizer(), max_len=9))
    assert field.tokenizer.languages == ()
