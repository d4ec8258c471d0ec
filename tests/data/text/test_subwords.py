"""Subwords of pretrained vocabularies: ids as the libraries give them, whichever files they come from."""

import json
import shutil

import pytest
from shared_data import SHARED, needs_shared
from text_lines import varied_lines
from transformers import BertTokenizer, GPT2Tokenizer

from vlm.data.text.hugging_face import read_tokenizer
from vlm.data.text.subwords import BytePairTokenizer, WordPieceTokenizer
from vlm.data.text.tokenizer import tokenizer_from_state
from vlm.data.text.tokenizer_base import compute_fingerprint
from vlm.errors import UserError
from vlm.models.pretrained.folder import Folder

VOCABULARIES = SHARED / "tokenizers"
END = 50256
GPT2, BERT = {"pad": END, "bos": END, "eos": END}, {"pad": None, "bos": None, "eos": None}
needs_vocabularies = needs_shared("tokenizers")
# A small vocabulary of our own: "low", "lower" and what they are made of.
PIECES = ["l", "o", "w", "e", "r", "lo", "low", "er", "lower", "<end>", "\u0120", "\u0120low"]
MERGES = [["l", "o"], ["lo", "w"], ["e", "r"], ["low", "er"], ["\u0120", "low"]]


def small(**changes):
    options = {"special": [9], "merges": MERGES, "prefix_space": False, "pad": 9, "bos": 9, "eos": 9}
    return BytePairTokenizer.of(**{"vocab": PIECES} | options | changes)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each vocabulary as plain files and as `transformers` saves it."""
    root = tmp_path_factory.mktemp("tokenizers")
    files = {
        "gpt2/encoder.json": "gpt2/vocab.json",
        "gpt2/vocab.bpe": "gpt2/merges.txt",
        "bert/vocab.txt": "bert/vocab.txt",
    }
    for source, target in files.items():
        (root / target).parent.mkdir(exist_ok=True)
        shutil.copyfile(VOCABULARIES / source, root / target)
    GPT2Tokenizer.from_pretrained(root / "gpt2").save_pretrained(root / "gpt2_saved")
    BertTokenizer.from_pretrained(root / "bert").save_pretrained(root / "bert_saved")
    return root


@pytest.mark.slow
@needs_vocabularies
@pytest.mark.parametrize("layout", ["", "_saved"], ids=["files", "saved"])
@pytest.mark.parametrize("name, key, ids", [("gpt2", "gpt2", GPT2), ("bert", "bert_uncased", BERT)])
def test_ids_are_the_published_ones(folders, layout, name, key, ids):
    tokenizer = read_tokenizer(Folder(folders / f"{name}{layout}"), ids)
    again = tokenizer_from_state(tokenizer.state())
    for case in json.loads((VOCABULARIES / "expected_ids.json").read_text())["cases"]:
        assert tokenizer.encode(case["text"]) == again.encode(case["text"]) == case[key]
        if name == "gpt2":
            assert again.decode(case[key]) == case["text"]
    assert again.fingerprint == tokenizer.fingerprint
    assert (again.pad_id, again.bos_id, again.eos_id) == ((END,) * 3 if name == "gpt2" else (0, 101, 102))


@needs_vocabularies
@pytest.mark.slow
@pytest.mark.parametrize("name, theirs, ids", [("gpt2", GPT2Tokenizer, GPT2), ("bert", BertTokenizer, BERT)])
def test_ids_of_ten_thousand_lines_are_theirs(folders, name, theirs, ids):
    lines = varied_lines(10_000)
    ours, truth = read_tokenizer(Folder(folders / name), ids), theirs.from_pretrained(folders / name)
    assert [ours.encode(line) for line in lines] == truth(lines, add_special_tokens=False).input_ids


def test_text_that_looks_like_a_special_token_is_text():
    tokenizer = small(vocab=[*PIECES[:9], "<low>", *PIECES[10:]])
    assert tokenizer.encode("low") == [6] and tokenizer.encode("lower low") == [8, 11]
    assert 9 not in tokenizer.encode("<low>") and tokenizer.decode([6, 9]) == "low"


BAD_VOCAB = [[*PIECES[:-1], "l"], [*PIECES[:-1], "x" * 2000], [*PIECES[:-1], "\u4e00"], [*PIECES[:-1], 3], []]
MISFITS = [{"vocab": vocab} for vocab in BAD_VOCAB]
MISFITS += [{"merges": [["l", "zz"]]}, {"merges": [["l"]]}, {"merges": [["l", 3]]}, {"eos": 12}, {"eos": True}]
MISFITS += [{"special": [-1]}, {"prefix_space": 1}, {"normalizer": "strip"}]


@pytest.mark.parametrize("changes", MISFITS, ids=str)
def test_parts_that_do_not_fit_are_refused(changes):
    with pytest.raises((ValueError, TypeError)):
        small(**changes)


def test_a_state_with_other_ids_is_refused():
    """As another version of the library would give: the ids of fixed strings are hashed."""
    state, other = small().state(), small(merges=MERGES[:-1]).state()
    assert len(json.loads(state["learned"])["probe"]) == 64
    forged = {**state, "learned": json.dumps({**json.loads(other["learned"]), "probe": "0" * 64})}
    with pytest.raises(UserError, match="damaged"):
        tokenizer_from_state(forged)
    forged["fingerprint"] = compute_fingerprint(forged["class"], forged["options"], forged["learned"].encode("latin1"))
    with pytest.raises(UserError, match="gives other ids"):
        tokenizer_from_state(forged)


def test_words_are_decoded_as_they_are_written():
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "do", "##g", "##s", "run", ",", ".", "n't"]
    options = {"unk": 1, "clean_text": True, "chinese_chars": True, "strip_accents": None, "lower": True, "mask": 3}
    ids = {"pad": 0, "bos": 2, "eos": 3}
    tokenizer = WordPieceTokenizer.of(vocab, special=range(4), longest_word=100, **options, **ids)
    assert tokenizer.encode("Dogs, RUN.") == [4, 5, 6, 8, 7, 9]
    assert tokenizer.decode([2, 4, 5, 6, 8, 7, 9, 3]) == "dogs, run."
    assert tokenizer.decode([5, 4, 9]) == "##g do."
    assert tokenizer.encode("cats") == [1] and tokenizer.unk_id == 1 and tokenizer.mask_id == 3
    with pytest.raises(ValueError, match="out of range"):
        WordPieceTokenizer.of(vocab, special=range(4), longest_word=100, **options | {"mask": 11}, **ids)
