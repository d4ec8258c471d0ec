"""Files of tokens: what was written comes back, from a file that is whole or is not used at all."""

import errno
import fcntl
import json
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm.data.text import token_file
from vlm.data.text import token_file as encoding
from vlm.data.text.token_file import PREFIX, START, TokenFile, open_tokens, write_tokens
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from vlm.errors import UserError

ROOT = Path(__file__).parents[3]
TEXTS = [
    "First Citizen:\nBefore we\tproceed,\n\n  hear me.",
    "Ältere Wörter\r\nund 你好\u2028\x0b\x85…",
    "a" * 300 + "\n",
]
AWKWARD = ["\n", "\r\n", "\r", "\t", " ", "  ", "\n\n", "\u2028", "\x85", "\x0b", "\u2581", "</s>", "é", "你", "word"]
CLASSES = {"bytes": ByteTokenizer, "char": CharTokenizer}
CLASSES |= {kind: partial(SentencePieceTokenizer, model_type=kind) for kind in ("bpe", "unigram")}
FITTED = {name: make().fit(TEXTS) for name, make in CLASSES.items()}
BYTES = FITTED["bytes"]
each = pytest.mark.parametrize("name", FITTED)
any_text = st.text() | st.lists(st.sampled_from(AWKWARD), max_size=20).map("".join)
modest = settings(derandomize=True, max_examples=25)


def lines(text):
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def write(path, texts, tokenizer=BYTES, **options):
    write_tokens(path, map(lines, texts), tokenizer, **options)
    return TokenFile(path, tokenizer.fingerprint)


@each
@modest
@given(texts=st.lists(any_text, min_size=1, max_size=4))
def test_documents_come_back_between_their_begin_and_end(name, texts, tmp_path_factory):
    tokenizer = FITTED[name]
    file = write(tmp_path_factory.mktemp("tokens") / "t", texts, tokenizer)
    ids, whole = file.tokens.tolist(), file.header
    begins = [at for at, id in enumerate(ids) if id == tokenizer.bos_id]
    found = [ids[start:stop] for start, stop in zip(begins, [*begins[1:], len(ids)], strict=True)]
    assert begins[0] == 0 and [document[-1] for document in found] == [tokenizer.eos_id] * len(texts)
    assert [tokenizer.decode(document[1:-1]) for document in found] == texts
    sizes = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    assert (whole.documents, whole.tokens, whole.words, whole.bytes) == (len(texts), len(ids), *sizes)


@each
def test_line_by_line_is_the_same_as_at_once(name, tmp_path):
    tokenizer = FITTED[name]
    for text in TEXTS:
        ids = write(tmp_path / "t", [text], tokenizer).tokens.tolist()
        assert ids == [tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]


@modest
@given(texts=st.lists(any_text, min_size=1, max_size=4), size=st.integers(1, 40))
def test_jobs_of_any_size_give_the_same_file(texts, size, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    write(folder / "large", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "JOB", size)
        write(folder / "small", texts, processes=1)
    assert (folder / "small").read_bytes() == (folder / "large").read_bytes()


def test_words_are_counted_once_where_a_long_line_is_parted(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "JOB", 1)
    write_tokens(tmp_path / "t", [["on", "e two", " ", "three", "\n", "four"]], BYTES, processes=1)
    assert TokenFile(tmp_path / "t", BYTES.fingerprint).header.words == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["char", "bpe"])
def test_processes_write_what_one_does(name, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "JOB", 100)
    texts = [text * count for count, text in enumerate(TEXTS * 12)]
    write(tmp_path / "one", texts, FITTED[name], processes=1)
    monkeypatch.delattr(encoding, "_encode_job")  # here, not in the others
    write(tmp_path / "two", texts, FITTED[name], processes=2)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


KILLED = """
import os, signal
from vlm.data.text import token_file as encoding
from vlm.data.text.tokenizer import ByteTokenizer

def endless():
    while True:
        yield ["some text"]

encoding.JOB = 1
parts = encoding.encode_documents(endless(), ByteTokenizer(), 2)
next(parts)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_processes_end_when_the_one_that_started_them_is_killed():
    # This waits for all that could still write to the pipe, and so for each of them.
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_tokens_are_mapped_and_stay_so_in_another_process(tmp_path):
    file = write(tmp_path / "t", ["long " * 10_000])
    packed = pickle.dumps(file)
    again = pickle.loads(packed)
    assert len(packed) < 1000 and np.array_equal(again.tokens, file.tokens)
    for one in (file, again):
        assert isinstance(one.tokens, np.memmap) and not one.tokens.flags.owndata and not one.tokens.flags.writeable


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "<u2"), (2**16 + 1, "<u4")])
def test_ids_take_no_more_room_than_the_vocabulary_asks_for(size, dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", size)
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [size - 1])
    file = write(tmp_path / "t", ["x"])
    assert file.header.dtype == file.tokens.dtype.str == dtype
    assert file.tokens.tolist() == [1, size - 1, 2]


def rewrite_header(data, **changes):
    length = PREFIX.unpack(data[: PREFIX.size])[2]
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    new = json.dumps({**header, **changes}).encode()
    return (PREFIX.pack(token_file.MAGIC, token_file.VERSION, len(new)) + new).ljust(START, b"\0") + data[START:]


DAMAGES = {
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-1],
    "header only": lambda data: data[:100],
    "longer": lambda data: data + b"\0",
    "foreign": lambda data: b"PK\3\4" + data[4:],
    "other version": lambda data: data[:8] + b"\xff" + data[9:],
    "no JSON": lambda data: data[:16] + b"?" + data[17:],
    "other dtype": lambda data: rewrite_header(data, dtype="<f2"),
    "object dtype": lambda data: rewrite_header(data, dtype="|O"),
    "unknown key": lambda data: rewrite_header(data, more=1),
    "count": lambda data: rewrite_header(data, tokens=3),
    "no count": lambda data: rewrite_header(data, tokens="three"),
    "other tokenizer": lambda data: rewrite_header(data, tokenizer="0" * 64),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_whole_is_refused_and_written_anew(damage, tmp_path):
    path = tmp_path / "t"
    with pytest.raises(UserError, match=r"t: No such file"):
        TokenFile(path, BYTES.fingerprint)
    write(path, ["some text\n"])
    good = path.read_bytes()
    path.write_bytes(damage(good))
    with pytest.raises(UserError, match=f"{path}.*delete"):
        TokenFile(path, BYTES.fingerprint)
    open_tokens(path, [["some text\n"]], BYTES)
    assert path.read_bytes() == good


def test_a_whole_file_is_not_written_again(tmp_path):
    def unreadable():
        raise AssertionError("was read again")
        yield

    first = open_tokens(tmp_path / "t", [["text"]], BYTES)
    assert open_tokens(tmp_path / "t", unreadable(), BYTES).header == first.header


def test_the_digest_tells_ids_from_others(tmp_path):
    digests = {write(tmp_path / "t", texts).header.digest for texts in (["ab"], ["ba"], ["a", "b"], ["abc"])}
    assert len(digests) == 4


def test_a_fault_on_the_way_leaves_nothing_and_spoils_nothing(tmp_path):
    def broken():
        yield ["fine\n"]
        raise UserError("the second is not UTF-8")

    write(tmp_path / "t", ["before"])
    before = (tmp_path / "t").read_bytes()
    for name in ("t", "u"):
        with pytest.raises(UserError, match="the second"):
            write_tokens(tmp_path / name, broken(), BYTES)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_where_nothing_can_be_written_the_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="file/t: cannot be written") as caught:
        open_tokens(tmp_path / "file" / "t", [["text"]], BYTES)
    assert caught.value.status == 1


@pytest.mark.slow
def test_of_those_that_ask_at_once_one_writes(tmp_path):
    reads = []

    def documents():
        reads.append(1)
        time.sleep(0.3)
        yield ["text\n"]

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(open_tokens, tmp_path / "t", documents(), BYTES) for _ in range(3)]
        found = [one.result().tokens.tolist() for one in asked]
    assert len(reads) == 1 and found == [[1, *BYTES.encode("text\n"), 2]] * 3


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_it_is_written_where_the_file_system_has_no_locks(code, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(code, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert open_tokens(tmp_path / "t", [["a"]], BYTES).header.tokens == 3
