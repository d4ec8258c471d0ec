"""Windows onto text: what training and evaluation read, by brute force over the ids."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vlm.data.records import ListSplit, Record, Source
from vlm.data.samples import SampleKey
from vlm.data.text.text_field import LEARNED_FROM, TextField
from vlm.data.text.token_file import TokenFile
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from vlm.errors import UserError
from vlm.training.data_module import Data

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id
TRAIN = ["The first text.\nIt has two lines.\n", "x", "The third, somewhat longer than both before it.\n" * 3]
VAL = ["Some words of validation: ünïcödé 你好\n\n and more.\n", "a b", "c"]


class Texts(Source):
    """Texts of a test; counts how often one is read."""

    holds = ("document",)

    def __init__(self, train=TRAIN, val=VAL, size=0, **more):
        self.texts = {"train": train, "val": val, **more}
        self.splits, self.reads, self._size = tuple(self.texts), 0, size

    def open(self, name):
        return ListSplit(self.texts[name], lambda text, epoch: Record(text, {"document": self.document(text)}))

    def document(self, text):
        def lines():
            self.reads += 1
            yield from text.splitlines(keepends=True)

        return SimpleNamespace(lines=lines, size=lambda: self._size)


def data(source=None, tokenizer=None, *, max_len=8, stride=None, **options):
    given = {"batch_size": 6, "eval_batch_size": 5, "num_workers": 0, "order_seed": 3}
    text = TextField(tokenizer=tokenizer or ByteTokenizer(), max_len=max_len, stride=stride)
    module = Data(source=source or Texts(), fields={"text": text}, **given | options)
    module.prepare()
    return module


def field(*args, **options):
    return data(*args, **options).fields["text"]


def windows(*args, **options):
    return data(*args, **options).samples("train", training=True)


def stream(texts):
    """The ids of documents end to end, reckoned from UTF-8."""
    return [id for text in texts for id in (BOS, *(byte + 3 for byte in text.encode()), EOS)]


def number_segments(row):
    """Segments of a row of ids: 1, and one more at each further begin."""
    found, number = [], 1
    for at, id in enumerate(row):
        number += at > 0 and id == BOS
        found.append(number)
    return found


def start(batch, row):
    return int(batch.ids[row].rpartition("-")[2])


def parts(text):
    segments = torch.ones_like(text.tokens) if text.segments is None else text.segments
    scored = torch.ones_like(text.tokens, dtype=torch.bool) if text.scored is None else text.scored
    return zip(text.tokens.tolist(), segments.tolist(), scored.tolist(), strict=True)


def rows(batch):
    for row, values in enumerate(parts(batch["text"])):
        yield start(batch, row), *values


@pytest.mark.parametrize("max_len", [1, 2, 8, 31, len(stream(TRAIN)) - 1])
def test_training_reads_windows_of_the_text_with_its_documents_told_apart(max_len):
    ids = stream(TRAIN)
    module = data(max_len=max_len)
    batches = list(module.train_dataloader())
    assert sum(len(batch["text"].tokens) for batch in batches) == -(-len(ids) // max_len)
    assert len(module.samples("train", training=True)) == -(-len(ids) // max_len)
    for batch in batches:
        text = batch["text"]
        assert text.tokens.dtype == torch.int64 and text.tokens.shape[1] == max_len + 1
        assert text.scored is None and batch.bad == []
        for begin, tokens, segments, _ in rows(batch):
            assert tokens == ids[begin : begin + max_len + 1]
            assert segments == number_segments(tokens)


@pytest.mark.parametrize("train, alone", [(["one document " * 50], True), (["ab"] * 50, False)])
def test_rows_within_one_document_need_no_segments(train, alone):
    assert all((batch["text"].segments is None) == alone for batch in data(Texts(train=train)).train_dataloader())


def test_windows_begin_anywhere_equally_often():
    split = windows(Texts(train=["0123456789"]), max_len=8).split
    places = [split.places(epoch) for epoch in range(3000)]
    counts = np.bincount(np.concatenate(places))
    assert len(counts) == 12 - 8  # 10 bytes, a begin and an end: the last window ends with the last token
    assert counts / counts.sum() == pytest.approx([1 / 4] * 4, abs=0.02)


def test_windows_are_a_function_of_seed_epoch_and_index():
    source = Texts(train=TRAIN * 20)
    samples, other = windows(source), windows(source)
    keys = [SampleKey(2, 5), SampleKey(2, 0), SampleKey(2, 77)]
    whole = samples.__getitems__(keys)
    samples.__getitems__([SampleKey(1, 5)])
    alone = [other.__getitems__([key]) for key in reversed(keys)][::-1]
    assert [batch.ids[0] for batch in alone] == whole.ids
    assert torch.equal(torch.cat([batch["text"].tokens for batch in alone]), whole["text"].tokens)
    assert other.__getitems__([SampleKey(0, 5), SampleKey(2, 5), SampleKey(1, 5)]).ids[1] == whole.ids[0]
    assert np.mean(other.split.places(0) == other.split.places(1)) < 0.1
    assert np.mean(windows(source, order_seed=4).split.places(0) == other.split.places(0)) < 0.1


def test_a_limit_keeps_the_first_windows_in_every_epoch():
    module = data(train_samples=4, batch_size=4)
    samples = module.samples("train", training=True)
    assert len(samples) == 4
    first, later = (samples.__getitems__([SampleKey(epoch, index) for index in range(4)]) for epoch in (0, 9))
    assert first.ids == later.ids == windows().__getitems__([SampleKey(0, index) for index in range(4)]).ids
    (evaluated,) = module.eval_dataloader("train")  # to see what was learnt by heart, it is what evaluation reads
    assert evaluated.ids == first.ids
    assert len(windows(train_samples=10**6)) == len(windows())


@pytest.mark.parametrize(("max_len", "stride"), [(8, None), (8, 1), (8, 8), (7, 3), (1, 1), (5, 2), (60, 25), (500, 7)])
@pytest.mark.parametrize("texts", [VAL, ["y"], ["one document, rather long " * 9], ["ab", "", "c"] * 20])
def test_evaluation_scores_every_token_once_with_context(texts, max_len, stride):
    ids = stream(texts)
    module = data(Texts(train=["t" * 600], val=texts), max_len=max_len, stride=stride)
    stride = module.fields["text"].stride
    seen, starts = Counter(), []
    for batch in module.val_dataloader():
        for begin, tokens, segments, scored in rows(batch):
            starts.append(begin)
            real = ids[begin : begin + max_len + 1]
            pad = max_len + 1 - len(real)
            assert tokens == real + [ByteTokenizer.pad_id] * pad
            assert segments == number_segments(real) + [0] * pad
            for at in np.flatnonzero(scored).tolist():
                seen[begin + at] += 1
                assert segments[at - 1] == segments[at] > 0  # so the one function that shifts labels has it
                assert begin == 0 or at > max_len - stride
    assert starts == [stride * number for number in range(len(starts))]
    assert seen == {at: 1 for at, id in enumerate(ids) if id != BOS}
    assert module.fields["text"].counts("val").tokens == seen.total()


def test_counts_are_those_of_the_text():
    size, words = len("".join(VAL).encode()), sum(len(text.split()) for text in VAL)
    assert field().counts("val") == (size + len(VAL), size, words)


def test_sampled_windows_are_drawn_anew_for_each_batch_and_again_the_same():
    first, second = field().sample_windows("val", batches=2, batch_size=4, seed=0)
    ids = stream(VAL)
    windows = {tuple(ids[begin : begin + 9]) for begin in range(len(ids) - 8)}
    for tokens, segments, _ in chain(parts(first), parts(second)):
        assert tuple(tokens) in windows
        assert segments == number_segments(tokens)
    assert first.scored is None and len(first.tokens) == 4
    again = list(field().sample_windows("val", batches=2, batch_size=4, seed=0))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(again, (first, second), strict=True))
    (other,) = field().sample_windows("val", batches=1, batch_size=4, seed=1)
    assert not torch.equal(first.tokens, second.tokens) and not torch.equal(first.tokens, other.tokens)
    (short,) = field(Texts(train=["t" * 99], val=["ab"])).sample_windows("val", batches=1, batch_size=3, seed=0)
    assert short.tokens.tolist() == [[*stream(["ab"]), 0, 0, 0, 0, 0]] * 3  # a split shorter than a window
    assert short.segments.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 0]] * 3


@pytest.mark.parametrize("make", [ByteTokenizer, CharTokenizer, SentencePieceTokenizer])
def test_the_tokenizer_knows_train_alone_and_loses_nothing_of_val(make, tmp_path):
    tokenizer = make()
    module = data(tokenizer=tokenizer, cache=str(tmp_path))
    assert tokenizer.fingerprint == make().fit(line for text in TRAIN for line in text.splitlines(True)).fingerprint
    assert module.sizes == {"vocab_size": tokenizer.vocab_size}
    text = module.fields["text"]
    assert tokenizer.decode(text.tokens("val").tokens.tolist()) == "".join(VAL)
    assert text.state() == {"tokenizer": tokenizer.state()}


def test_of_much_text_the_tokenizer_learns_from_some():
    source = Texts(train=["".join(f"{letter}\n" for letter in "abcdef") * 9], size=3 * LEARNED_FROM)
    tokenizer = field(source, CharTokenizer(), max_len=4).tokenizer
    assert tokenizer.vocab_size == 3 + 256 + len("ad\n")


def test_a_second_run_reads_no_text_but_for_the_tokenizer(tmp_path):
    for make, learns in ((ByteTokenizer, 0), (CharTokenizer, len(TRAIN))):
        data(tokenizer=make(), cache=str(tmp_path))
        source = Texts()
        again = field(source, make(), cache=str(tmp_path))
        assert source.reads == learns
        assert isinstance(again.tokens("train"), TokenFile)
    assert len(list(tmp_path.glob("*.tokens"))) == 4
    data(Texts(val=["other"]), cache=str(tmp_path))
    assert len(list(tmp_path.glob("*.tokens"))) == 5


def test_the_fingerprint_is_of_the_training_text():
    assert data().fingerprint() == data(Texts(val=["other"])).fingerprint()
    others = [Texts(train=TRAIN[:2]), Texts(train=[*TRAIN[:2], TRAIN[2].lower()]), Texts(train=["".join(TRAIN)])]
    found = {data(source).fingerprint() for source in (None, *others)}
    assert len(found | {data(tokenizer=CharTokenizer()).fingerprint()}) == 5


def test_restoring_takes_the_tokenizer_of_the_checkpoint():
    tokenizer, module = CharTokenizer().fit(VAL), data()
    text = module.fields["text"]
    list(module.val_dataloader())
    module.restore({"tokenizer": tokenizer.state()})
    assert text.tokenizer.fingerprint == tokenizer.fingerprint
    ids = text.tokens("val").tokens.tolist()
    assert len(ids) < len(stream(VAL))  # characters, no longer bytes
    assert next(iter(module.val_dataloader()))["text"].tokens[0].tolist() == ids[:9]


def test_the_last_split_is_final_and_others_are_refused():
    module = data(Texts(test=["tests"]))
    assert module.final_split == "test"
    with pytest.raises(UserError, match="no split 'dev'"):
        module.samples("dev")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": len(stream(TRAIN))}, r"data\.max_len: .* set it to at most"),
        ({"stride": 0}, r"data\.stride: 0"),
        ({"stride": 9}, r"data\.stride: 9 .* 1 to data\.max_len, which is 8"),
        ({"source": Texts(val=[""])}, "the split val has no text"),
    ],
)
def test_what_cannot_work_is_said_at_once(options, message):
    with pytest.raises(UserError, match=message):
        data(**options)
