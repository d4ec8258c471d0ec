"""Tagged words in columns: the traps of CoNLL-U and of tweets."""

import random

import conllu
import pytest
from caption_data import refusal

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


def read_rows(source, split="train"):
    return [(record.id, record["words"], record["tags"]) for record in source.split(split).records()]


def conll(path, **options):
    return Conll(path=path, val_fraction=0, test_fraction=0, **options)


@pytest.mark.parametrize(("word", "tag"), [("FORM", "UPOS"), (2, 4)])
def test_lines_of_several_words_and_empty_nodes_are_no_words(word, tag, tmp_path):
    source = conll(write(tmp_path / "t.conllu", TREEBANK), word_column=word, tag_column=tag)
    assert read_rows(source) == [
        ("3", ["vamos", "nos", "10\u00a0000"], ["VERB", "PRON", "NUM"]),
        ("9", ["Sue", "likes"], ["PROPN", "VERB"]),
    ]
    assert read_rows(conll(str(tmp_path / "t.conllu"), word_column=word, tag_column="XPOS"))[1][2] == ["NP", "V1"]


def test_tweets(tmp_path):
    """A topic begins with #, a lone tab ends a sentence, a zero-width space is a word, a mark of byte order is none."""
    text = "\ufeff@paul\tO\n#photo\tO\n\t\nEmpire\tB-place\nState\tI-place\n\u200b\tO\n#\tO\n\n\n"
    assert read_rows(conll(write(tmp_path / "t.conll", text))) == [
        ("1", ["@paul", "#photo"], ["O", "O"]),
        ("4", ["Empire", "State", "\u200b", "#"], ["B-place", "I-place", "O", "O"]),
    ]


def test_columns_of_spaces_and_named_ones(tmp_path):
    path = write(tmp_path / "t", "EU NNP B-ORG\nrejects VBZ O\n")
    assert read_rows(conll(path, tag_column=3, delimiter=" ")) == [("1", ["EU", "rejects"], ["B-ORG", "O"])]
    named = write(tmp_path / "plus", "# global.columns = ID FORM NER\n1-2\tdont\t_\n1\tdo\tO\n2\tnt\tO\n\n")
    assert read_rows(conll(named, word_column="FORM", tag_column="NER")) == [("2", ["do", "nt"], ["O", "O"])]


def test_a_sentence_with_a_bad_line_is_left_out_and_named(tmp_path):
    path = write(tmp_path / "t", "a\tO\nb\n\nc\tO\n\n\tO\n\nd\tO\n")
    source = conll(path)
    assert [words for _, words, _ in read_rows(source)] == [["c"], ["d"]]
    used = "the sentence is skipped"
    assert source.skipped == [f"{path}, line 2: no tag; {used}", f"{path}, line 6: no word; {used}"]


@pytest.mark.parametrize(
    ("text", "options", "parts"),
    [
        ("a\tO\n", {"word_column": "FORM"}, ["line 1", "'FORM'", "2 without names", "data.source.word_column"]),
        (TREEBANK, {"word_column": "FORM", "tag_column": "NER"}, ["'NER'", "LEMMA", "data.source.tag_column"]),
        ("a\n\nb\n", {}, ["no usable sample", "2 problems", "line 1: no tag"]),
        ("a O\nb O\n", {}, ["no line has a tab", "set data.source.delimiter=' '"]),
    ],
)
def test_faults_are_named(text, options, parts, tmp_path):
    message = refusal(conll, write(tmp_path / "t", text), **options)
    assert all(part in message for part in parts), message
    assert "data.path=gone: no such file" in refusal(conll, "gone") and "is a folder" in refusal(conll, str(tmp_path))


COMMENTS = ["# sent_id = {n}", "# text\t=\ta # b", "# id abc{n}\tdomain=en", "#", "#\t" + "\t".join("abcdefghi"), "#x"]


def treebank(seed, sentences=12):
    """A file of CoNLL-U with odd comments, words, blank lines and line ends."""
    rng = random.Random(seed)
    words = ["#", "#photo", "10 000", "\u200b", "a\x85b", "-", "-DOC-", '"', "w\u2028x", "_"]
    blocks = []
    for n in range(sentences):
        lines = [comment.format(n=n) for comment in rng.sample(COMMENTS, rng.randint(0, 4))]
        for id in range(1, rng.randint(2, 6)):
            form, tag = rng.choice([*words, f"w{n}"]), rng.choice(["NOUN", "VERB", "_"])
            cells = [form, "_", tag, "_", "_", "0", "root", "_", "_"]
            lines += ["\t".join([f"{id}-{id + 1}", "xy", *"________"])] if rng.random() < 0.2 else []
            lines += ["\t".join([str(id), *cells])]
            lines += ["\t".join([f"{id}.1", *cells])] if rng.random() < 0.2 else []
        blocks.append("\n".join(lines))
    end = rng.choice(["\n", "\r\n"])
    return (rng.choice(["\n\n", "\n\n\n"]).join(blocks) + rng.choice(["", "\n", "\n\n"])).replace("\n", end)


@pytest.mark.parametrize("seed", range(40))
def test_treebanks_are_read_as_by_the_package_conllu(seed, tmp_path):
    text = treebank(seed)
    (tmp_path / "t.conllu").write_bytes(text.encode())
    source = conll(str(tmp_path / "t.conllu"), word_column="FORM", tag_column="UPOS")
    sentences = [[token for token in one if isinstance(token["id"], int)] for one in conllu.parse(text)]
    truth = [([token["form"] for token in one], [token["upos"] for token in one]) for one in sentences]
    assert [(words, tags) for _, words, tags in read_rows(source)] == truth and not source.skipped


TRUTH = [(["robert", "#1", f"w{n}"], ["B-PER", "I-PER", "O"]) for n in range(5)]


def rows(columns, delimiter, comment):
    """TRUTH as lines of the given columns, with a comment before each sentence."""
    lines = []
    for n, (words, tags) in enumerate(TRUTH):
        lines += [comment.format(n=n)] if comment else []
        pairs = zip(words, tags, strict=True)
        cells = [dict(id=str(at), word=word, tag=tag, pad="_") for at, (word, tag) in enumerate(pairs, 1)]
        lines += [*(delimiter.join(cell[name] for name in columns) for cell in cells), ""]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("columns", "delimiter", "comment"),
    [
        ("word pad pad tag", " ", "# id abc{n}\tdomain=en"),  # MultiCoNER
        ("word pad tag", " ", "# id abc{n}\tdomain=en"),  # as many cells as a word
        ("word tag", "\t", "# id abc{n}\tdomain=en"),
        ("word tag", "\t", "#id abc{n}\tdomain=en"),
        ("id word tag pad", "\t", "#\thttp://de.wikipedia.org/wiki/{n} [2010-05-13]"),  # GermEval 2014
        ("word pad pad tag", " ", "-DOCSTART- -X- -X- O\n"),  # CoNLL 2003
        ("word tag", "\t", "-DOCSTART-\tO"),
        ("word tag", "\t", "-DOCSTART- ({n})\tO\n"),
        ("word pad pad tag", "   ", ""),  # padded columns
        ("word pad pad pad pad tag", " ", "#begin document (bc/{n}); part 000\n\n#end document"),
    ],
)
def test_comments_and_lines_between_documents_are_no_words(columns, delimiter, comment, tmp_path):
    columns = columns.split()
    path = write(tmp_path / "t.conll", rows(columns, delimiter, comment))
    places = {"word_column": 1 + columns.index("word"), "tag_column": 1 + columns.index("tag")}
    source = conll(path, delimiter=delimiter[0], **places)
    assert [(words, tags) for _, words, tags in read_rows(source)] == TRUTH and not source.skipped


@pytest.mark.parametrize("topic", ["#\tO", "#photo\tO", "#photo\tB-x"])
def test_words_that_begin_with_a_number_sign_are_words(topic, tmp_path):
    path = write(tmp_path / "t.conll", f"{topic}\nof\tO\n\n{topic}\n\na\tO\n")
    word, tag = topic.split("\t")
    expected = [([word, "of"], [tag, "O"]), ([word], [tag]), (["a"], ["O"])]
    assert [(words, tags) for _, words, tags in read_rows(conll(path))] == expected
    source = conll(write(tmp_path / "s", "# NN O\nEU NNP B-ORG\n"), tag_column=3, delimiter=" ")
    assert [words for _, words, _ in read_rows(source)] == [["#", "EU"]]
