"""Fields of text for encoders, and the one tokenizer of those that share it."""

from vlm.data.batch import IGNORE
from vlm.data.fields import CaptionField, learn_tokenizers
from vlm.data.records import ListSplit, Record, Source
from vlm.data.text.inputs import InputField, TagField, WordsField
from vlm.data.text.tokenizer import CharTokenizer

TRAIN = [
    {"text": "a red dot", "captions": ["ein roter Punkt"], "words": ["a", "dot"], "tags": ["O", "B"]},
    {"text": "rot", "captions": ["öde"], "words": ["red"], "tags": ["I"]},
]
VAL = [{"text": "xyz", "captions": [], "words": ["dot", "dot"], "tags": ["B", "Z"]}]


class Told(Source):
    splits = ("train", "val")

    def open(self, name):
        rows = list(enumerate(TRAIN if name == "train" else VAL))
        return ListSplit(rows, lambda row, epoch: Record(f"{row[0]}", row[1] | {"references": row[1]["captions"]}))


def opened(*fields):
    source = Told()
    for field in fields:
        field.open(source, {name: source.split(name) for name in source.splits}, seed=0, cache=None)
    learn_tokenizers(fields, None)
    for field in fields:
        field.prepare()
    return source


def test_a_shared_tokenizer_is_learned_from_the_texts_of_all_its_fields():
    shared, own = CharTokenizer(), CharTokenizer()
    source, target = InputField(tokenizer=shared, max_len=9), CaptionField(tokenizer=shared, max_len=9)
    words = WordsField(tokenizer=own, max_len=9)
    opened(source, target, words)
    texts = ["a red dot", "rot", "ein roter Punkt", "öde"]
    assert shared.fingerprint == CharTokenizer().fit(texts).fingerprint
    assert own.fingerprint == CharTokenizer().fit([" a dot", " red"]).fingerprint
    assert source.sizes == target.sizes == {"vocab_size": shared.vocab_size}


def test_a_text_is_read_and_counted():
    field = InputField(tokenizer=CharTokenizer(), max_len=8)
    record = opened(field).split("train").record(0)
    rows = field.collate([field.encode(record, None)])
    tokenizer = field.tokenizer
    assert rows.tokens.tolist() == [[tokenizer.bos_id, *tokenizer.encode("a red "), tokenizer.eos_id]]
    assert field.length(record) == 8 and field.identity(record) == ["a red dot"] and not field.pairs
    pair = Record("", {"text": "a", "pair": "dot"})
    assert field.collate([field.encode(pair, None)]).types.tolist() == [[0] * 3 + [1] * 4 + [0]]


def test_words_and_tags_are_as_many():
    tokenizer = CharTokenizer()
    words, tags = WordsField(tokenizer=tokenizer, max_len=5), TagField()
    source = opened(words, tags)
    records = [*source.split("train").records(), *source.split("val").records()]
    rows = words.collate([words.encode(record, None) for record in records])
    found = tags.collate([tags.encode(record, None) for record in records])
    assert tags.classes == ["B", "I", "O"] and tags.sizes == {"num_classes": 3}
    assert found.labels.tolist() == [2, 0, 1, 0, IGNORE]  # of the last tag training knows nothing
    assert found.count == 4 and found.tags == [["O", "B"], ["I"], ["B", "Z"]]
    assert rows.counts == [2, 1, 2] and len(rows.places) == 5 and rows.texts == [r["words"] for r in (*TRAIN, *VAL)]
    assert words.length(records[0]) == 4 + 5  # begin, space, a, end; then begin, space, d, o, end


def test_what_a_checkpoint_holds_is_taken_again():
    field, tags, fresh = InputField(tokenizer=CharTokenizer(), max_len=8), TagField(), TagField()
    opened(field, tags)
    again = InputField(tokenizer=CharTokenizer(), max_len=8)
    again.restore(field.state())
    assert again.tokenizer.fingerprint == field.tokenizer.fingerprint and field.state()["max_len"] == 8
    opened(fresh)
    fresh.restore({"classes": ["I", "B"]})
    assert fresh.collate([["B", "O"]]).labels.tolist() == [1, IGNORE]
