"""Windows onto text: what training and evaluation read, by brute force over the ids."""

import warnings
from itertools import chain

import numpy as np
import pytest
import torch
from vlm.training.text_data import LEARNED_FROM, TextBatch, TextData

from vlm.data.order import EvalBatches
from vlm.data.text.token_file import TokenFile
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from vlm.data.text.windows import SlidingWindows
from vlm.errors import UserError

BOS, EOS = ByteTokenizer.bos_id, ByteTokenizer.eos_id
TRAIN = ["The first text.\nIt has two lines.\n", "x", "The third, somewhat longer than both before it.\n" * 3]
VAL = ["Some words of validation: ünïcödé 你好\n\n and more.\n", "a b", "c"]


class Texts:
    """Texts of a test; counts how often they are read."""

    def __init__(self, train=TRAIN, val=VAL, size=0, **more):
        self.texts = {"train": list(train), "val": list(val), **more}
        self.splits, self.skipped, self.reads = tuple(self.texts), ["one: is empty"], 0
        self._size = size

    def documents(self, split):
        self.reads += 1
        return (text.splitlines(keepends=True) for text in self.texts[split])

    def size(self, split):
        return self._size

    def signature(self):
        return repr(self.texts)


def data(source=None, tokenizer=None, **options):
    given = {"batch_size": 6, "eval_batch_size": 5, "num_workers": 0, "max_len": 8, "seed": 3}
    module = TextData(source=source or Texts(), tokenizer=tokenizer or ByteTokenizer(), **given | options)
    module.prepare()
    return module


def stream(texts):
    """The ids of documents end to end, reckoned from UTF-8."""
    return [id for text in texts for id in (BOS, *(byte + 3 for byte in text.encode()), EOS)]


def numbered(row):
    """Segments of a row of ids: 1, and one more at each further begin."""
    found, number = [], 1
    for at, id in enumerate(row):
        number += at > 0 and id == BOS
        found.append(number)
    return found


def start(batch, row):
    return int(batch.ids[row].rpartition("-")[2])


def rows(batch):
    segments = torch.ones_like(batch.tokens) if batch.segments is None else batch.segments
    scored = torch.ones_like(batch.tokens, dtype=torch.bool) if batch.scored is None else batch.scored
    for row in range(len(batch.tokens)):
        yield start(batch, row), batch.tokens[row].tolist(), segments[row].tolist(), scored[row].tolist()


@pytest.mark.parametrize("max_len", [1, 2, 8, 31])
def test_training_reads_windows_of_the_text_with_its_documents_told_apart(max_len):
    ids = stream(TRAIN)
    module = data(max_len=max_len)
    batches = list(module.train_dataloader())
    assert (
        sum(len(batch.tokens) for batch in batches)
        == -(-len(ids) // max_len)
        == len(module.dataset("train", augmented=True))
    )
    for batch in batches:
        assert batch.tokens.dtype == torch.int64
        assert batch.tokens.shape[1] == max_len + 1
        assert batch.scored is None and batch.bad == []
        for begin, tokens, segments, _ in rows(batch):
            assert tokens == ids[begin : begin + max_len + 1]
            assert segments == numbered(tokens)


def test_rows_within_one_document_need_no_segments():
    batches = list(data(Texts(train=["one document " * 50])).train_dataloader())
    assert all(batch.segments is None for batch in batches)
    batches = list(data(Texts(train=["ab"] * 50)).train_dataloader())
    assert all(batch.segments is not None for batch in batches)


def test_windows_begin_anywhere_equally_often():
    windows = data(Texts(train=["0123456789"]), max_len=8).dataset("train", augmented=True)
    places = [windows.places(epoch) for epoch in range(3000)]
    counts = np.bincount(np.concatenate(places))
    assert len(counts) == 12 - 8  # 10 bytes, a begin and an end: the last window ends with the last token
    assert counts / counts.sum() == pytest.approx([1 / 4] * 4, abs=0.02)


def test_windows_are_a_function_of_seed_epoch_and_index():
    source = Texts(train=TRAIN * 20)
    windows = data(source).dataset("train", augmented=True)
    keys = [(2, 5), (2, 0), (2, 77)]
    whole = windows.__getitems__(keys)
    windows.__getitems__([(1, 5)])
    other = data(source).dataset("train", augmented=True)
    alone = [other.__getitems__([key]) for key in reversed(keys)][::-1]
    assert [batch.ids[0] for batch in alone] == whole.ids
    assert torch.equal(torch.cat([batch.tokens for batch in alone]), whole.tokens)
    mixed = other.__getitems__([(0, 5), (2, 5), (1, 5)])
    assert mixed.ids[1] == whole.ids[0]
    same = np.mean(other.places(0) == other.places(1))
    assert same < 0.1
    assert np.mean(data(source, seed=4).dataset("train", augmented=True).places(0) == other.places(0)) < 0.1


def test_a_limit_keeps_the_first_windows_in_every_epoch():
    module = data(train_samples=4, batch_size=4)
    windows = module.dataset("train", augmented=True)
    assert len(windows) == 4
    first = windows.__getitems__([(0, index) for index in range(4)])
    later = windows.__getitems__([(9, index) for index in range(4)])
    assert (
        first.ids == later.ids == data().dataset("train", augmented=True).__getitems__([(0, i) for i in range(4)]).ids
    )
    (evaluated,) = module.eval_dataloader("train")  # to see what was learnt by heart, it is what evaluation reads
    assert evaluated.ids == first.ids
    assert len(data(train_samples=10**6).dataset("train", augmented=True)) == len(
        data().dataset("train", augmented=True)
    )


@pytest.mark.parametrize(("max_len", "stride"), [(8, None), (8, 1), (8, 8), (7, 3), (1, 1), (5, 2), (60, 25), (500, 7)])
@pytest.mark.parametrize("texts", [VAL, ["y"], ["one document, rather long " * 9], ["ab", "", "c"] * 20])
def test_evaluation_scores_every_token_once_with_context(texts, max_len, stride):
    ids = stream(texts)
    module = data(Texts(train=["t" * 600], val=texts), max_len=max_len, stride=stride)
    stride = module.stride
    seen = dict.fromkeys(range(len(ids)), 0)
    starts = []
    for batch in module.val_dataloader():
        assert batch.tokens.shape[1] == max_len + 1
        for begin, tokens, segments, scored in rows(batch):
            starts.append(begin)
            real = ids[begin : begin + max_len + 1]
            pad = max_len + 1 - len(real)
            assert tokens == real + [ByteTokenizer.pad_id] * pad
            assert segments == numbered(real) + [0] * pad
            for at in np.flatnonzero(scored).tolist():
                seen[begin + at] += 1
                assert segments[at - 1] == segments[at] > 0  # so the one function that shifts labels has it
                assert begin == 0 or at > max_len - stride
    assert starts == [stride * number for number in range(len(starts))]
    assert seen == {at: int(id != BOS) for at, id in enumerate(ids)}
    assert module.counts("val").tokens == sum(seen.values())


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_an_evaluation(world):
    windows = data().dataset("val")
    batches = [EvalBatches(size=len(windows), batch_size=6, rank=rank, world=world) for rank in range(world)]
    found = [windows.__getitems__(keys) for keys in chain(*batches)]
    assert sorted(chain(*(batch.ids for batch in found))) == sorted(chain(*(b.ids for b in data().val_dataloader())))
    assert sum(int(batch.scored.sum()) for batch in found) == data().counts("val").tokens


def test_counts_are_those_of_the_text():
    tokens, size, words = data().counts("val")
    text = "".join(VAL)
    assert size == len(text.encode())
    assert tokens == size + len(VAL)
    assert words == sum(len(text.split()) for text in VAL)


def test_sampled_windows_are_drawn_anew_for_each_batch_and_again_the_same():
    module = data()
    first, second = module.sampled_windows("val", 2, 4, seed=0)
    ids = stream(VAL)
    assert isinstance(first, TextBatch)
    for begin, tokens, segments, _ in chain(rows(first), rows(second)):
        assert tokens == ids[begin : begin + 9]
        assert segments == numbered(tokens)
    assert first.scored is None and len(first.tokens) == 4
    assert first.ids != second.ids
    again = list(data().sampled_windows("val", 2, 4, seed=0))
    assert [batch.ids for batch in again] == [first.ids, second.ids]
    assert next(module.sampled_windows("val", 1, 4, seed=1)).ids != first.ids


def test_a_split_shorter_than_a_window_is_sampled_whole():
    module = data(Texts(train=["t" * 99], val=["ab"]))
    (batch,) = module.sampled_windows("val", 1, 3, seed=0)
    assert batch.tokens.tolist() == [[*stream(["ab"]), 0, 0, 0, 0, 0]] * 3
    assert batch.segments.tolist() == [[1, 1, 1, 1, 0, 0, 0, 0, 0]] * 3


def test_workers_read_what_the_process_itself_does():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copying a process that has threads
        ways = [list(data(num_workers=workers).train_dataloader()) for workers in (0, 2)]
    for here, there in zip(*ways, strict=True):
        assert here.ids == there.ids
        assert torch.equal(here.tokens, there.tokens)


@pytest.mark.parametrize("make", [ByteTokenizer, CharTokenizer, SentencePieceTokenizer])
def test_the_tokenizer_knows_train_alone_and_loses_nothing_of_val(make, tmp_path):
    tokenizer = make()
    module = data(tokenizer=tokenizer, cache=str(tmp_path))
    assert tokenizer.fingerprint == make().fit(line for text in TRAIN for line in text.splitlines(True)).fingerprint
    assert module.sizes == {"vocab_size": tokenizer.vocab_size}
    assert tokenizer.decode(module.tokens("val").tokens.tolist()) == "".join(VAL)
    assert module.parts == {"tokenizer": tokenizer}
    assert module.skipped == ["one: is empty"]


def test_of_much_text_the_tokenizer_learns_from_some():
    source = Texts(train=["".join(f"{letter}\n" for letter in "abcdef") * 9], size=3 * LEARNED_FROM)
    tokenizer = data(source, CharTokenizer(), max_len=4).tokenizer
    assert tokenizer.vocab_size == 3 + 256 + len("ad\n")


def test_a_second_run_reads_no_text_but_for_the_tokenizer(tmp_path):
    data(cache=str(tmp_path))
    source = Texts()
    again = data(source, cache=str(tmp_path))
    assert source.reads == 1 + 2  # to learn from; then, of each split, documents that nobody goes through
    assert isinstance(again.tokens("train"), TokenFile)
    assert len(list(tmp_path.glob("*.tokens"))) == 2
    data(Texts(val=["other"]), cache=str(tmp_path))
    data(tokenizer=CharTokenizer(), cache=str(tmp_path))
    assert len(list(tmp_path.glob("*.tokens"))) == 6


def test_tokens_that_were_damaged_are_written_anew(tmp_path):
    before = data(cache=str(tmp_path)).tokens("val")
    whole = before.path.read_bytes()
    before.path.write_bytes(whole[:-1])
    data(cache=str(tmp_path))
    assert before.path.read_bytes() == whole


def test_the_fingerprint_is_of_the_training_text():
    assert data().fingerprint() == data(Texts(val=["other"]), seed=9).fingerprint()
    others = [Texts(train=TRAIN[:2]), Texts(train=[*TRAIN[:2], TRAIN[2].lower()]), Texts(train=["".join(TRAIN)])]
    found = {data(source).fingerprint() for source in (None, *others)}
    assert len(found | {data(tokenizer=CharTokenizer()).fingerprint()}) == 5


def test_restoring_takes_the_tokenizer_of_the_checkpoint():
    tokenizer = CharTokenizer().fit(VAL)
    module = data()
    before = module.tokens("val").tokens.tolist()
    list(module.val_dataloader())
    module.restore({"tokenizer": tokenizer.state()})
    assert module.tokenizer.fingerprint == tokenizer.fingerprint
    assert module.tokens("val").tokens.tolist() != before
    (first, *_) = module.val_dataloader()
    assert first.tokens[0].tolist() == module.tokens("val").tokens[:9].tolist()


def test_splits_are_counted_in_tokens_and_the_last_is_final():
    module = data(Texts(test=["tests"]))
    assert len(module.split("train")) == len(stream(TRAIN))
    assert module.final_split == "test"
    assert isinstance(module.dataset("train"), SlidingWindows)
    with pytest.raises(UserError, match="no split 'dev'"):
        module.tokens("dev")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_len": len(stream(TRAIN))}, r"data\.max_len: .* give at most"),
        ({"max_len": 0}, r"data\.max_len: 0"),
        ({"stride": 0}, r"data\.stride: 0"),
        ({"stride": 9}, r"data\.stride: 9 .* 1 to data\.max_len, which is 8"),
        ({"train_samples": 0}, r"data\.train_samples: 0"),
        ({"batch_size": 0}, r"data\.batch_size: 0"),
        ({"source": Texts(val=[""])}, "the split val holds no text"),
    ],
)
def test_what_cannot_work_is_said_at_once(options, message):
    with pytest.raises(UserError, match=message):
        data(**options)


def test_the_longest_window_is_the_whole_text():
    module = data(max_len=len(stream(TRAIN)) - 1)
    (batch,) = module.train_dataloader()
    assert batch.tokens.tolist() == [stream(TRAIN)] * 2
