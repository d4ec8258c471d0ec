"""Tagged words in columns: the traps of CoNLL-U and of tweets."""

import pytest
from captioned import refusal

from vlm.data.sources.conll import Conll

TREEBANK = """# newdoc id = x
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\tV1\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tP1\t_\t1\tobj\t_\t_
3\t10\u00a0000\t10\u00a0000\tNUM\tN1\t_\t1\tobl\t_\t_

# sent_id = 2
1\tSue\tSue\tPROPN\tNP\t_\t2\tnsubj\t_\t_
2\tlikes\tlike\tVERB\tV1\t_\t0\troot\t_\t_
2.1\tlikes\tlike\tVERB\tV1\t_\t_\t_\t_\t_
"""


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def held(source, split="train"):
    return [(record.id, record["words"], record["tags"]) for record in source.split(split).records()]


def conll(path, **options):
    return Conll(path=path, val_fraction=0, test_fraction=0, **options)


@pytest.mark.parametrize(("word", "tag"), [("FORM", "UPOS"), (2, 4)])
def test_lines_of_several_words_and_empty_nodes_are_no_words(word, tag, tmp_path):
    source = conll(write(tmp_path / "t.conllu", TREEBANK), word_column=word, tag_column=tag)
    assert held(source) == [
        ("3", ["vamos", "nos", "10\u00a0000"], ["VERB", "PRON", "NUM"]),
        ("9", ["Sue", "likes"], ["PROPN", "VERB"]),
    ]
    assert held(conll(str(tmp_path / "t.conllu"), word_column=word, tag_column="XPOS"))[1][2] == ["NP", "V1"]


def test_tweets(tmp_path):
    """A topic begins with #, a lone tab ends a sentence, a zero-width space is a word, a mark of byte order is none."""
    text = "\ufeff@paul\tO\n#photo\tO\n\t\nEmpire\tB-place\nState\tI-place\n\u200b\tO\n#\tO\n\n\n"
    assert held(conll(write(tmp_path / "t.conll", text))) == [
        ("1", ["@paul", "#photo"], ["O", "O"]),
        ("4", ["Empire", "State", "\u200b", "#"], ["B-place", "I-place", "O", "O"]),
    ]


def test_columns_of_spaces_and_named_ones(tmp_path):
    path = write(tmp_path / "t", "EU NNP B-ORG\nrejects VBZ O\n")
    assert held(conll(path, tag_column=3, delimiter=" ")) == [("1", ["EU", "rejects"], ["B-ORG", "O"])]
    named = write(tmp_path / "plus", "# global.columns = ID FORM NER\n1-2\tdont\t_\n1\tdo\tO\n2\tnt\tO\n\n")
    assert held(conll(named, word_column="FORM", tag_column="NER")) == [("2", ["do", "nt"], ["O", "O"])]


def test_files_of_each_split_and_drawn_ones(tmp_path):
    path = write(tmp_path / "t", "".join(f"w{n}\tO\n\n" for n in range(50)))
    source = Conll(path=path, test_path=path)
    assert source.splits == ("train", "test") and held(source, "test")[0][0] == "test:1"
    drawn = Conll(path=path, val_fraction=0.3, test_fraction=0.2)
    assert drawn.splits == ("train", "val", "test") and sum(len(held(drawn, name)) for name in drawn.splits) == 50


def test_a_sentence_with_a_bad_line_is_left_out_and_named(tmp_path):
    path = write(tmp_path / "t", "a\tO\nb\n\nc\tO\n\n\tO\n\nd\tO\n")
    source = conll(path)
    assert [words for _, words, _ in held(source)] == [["c"], ["d"]]
    used = "the sentence is skipped"
    assert source.skipped == [f"{path}, line 2: no tag; {used}", f"{path}, line 6: no word; {used}"]


@pytest.mark.parametrize(
    ("text", "options", "parts"),
    [
        ("a\tO\n", {"word_column": "FORM"}, ["line 1", "'FORM'", "2 without names", "data.source.word_column"]),
        (TREEBANK, {"word_column": "FORM", "tag_column": "NER"}, ["'NER'", "LEMMA", "data.source.tag_column"]),
        ("a\n\nb\n", {}, ["no usable sample", "2 faults", "line 1: no tag"]),
        ("", {}, ["no usable sample"]),
    ],
)
def test_faults_are_named(text, options, parts, tmp_path):
    message = refusal(conll, write(tmp_path / "t", text), **options)
    assert all(part in message for part in parts), message
    assert "data.path=gone: no such file" in refusal(conll, "gone") and "is a folder" in refusal(conll, str(tmp_path))
