"""Two files whose lines belong together, and their faults."""

import pytest
from captioned import refusal

from vlm.data.records import collect_errors
from vlm.data.sources.aligned_files import AlignedFiles


@pytest.fixture
def write(tmp_path):
    def write(**files):
        """Files by name, `train_en` for train.en."""
        for name, content in files.items():
            path = tmp_path / name.replace("_", ".")
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def opened(root, **options):
    return AlignedFiles(**{"root": str(root), "source": "en", "target": "de", "val": None, "test": None} | options)


def pairs(source, split="train"):
    return {record.id: (record["text"], record["translation"]) for record in source.split(split).records()}


def test_line_k_belongs_to_line_k(write):
    root = write(train_en="one\ntwo\n", train_de="eins\nzwei\n", test_en="three", test_de="drei")
    source = opened(root, test="test")
    assert source.splits == ("train", "test")
    assert pairs(source) == {"train-1": ("one", "eins"), "train-2": ("two", "zwei")}
    assert pairs(source, "test") == {"test-1": ("three", "drei")}
    assert pairs(opened(root, source="de", target="en"))["train-2"] == ("zwei", "two")


def test_only_a_line_feed_ends_a_line(write):
    odd = "no\u00a0break\u2028still one\x0b\x0cline\x85 end"
    source = opened(write(train_en=f"\ufeff{odd}\r\nb\n", train_de="eins\r\nzwei\r\n"))
    assert pairs(source) == {"train-1": (odd, "eins"), "train-2": ("b", "zwei")}


def test_an_empty_side_is_named_and_left_out(write):
    root = write(train_en="one\n\nthree\nfour\n", train_de="eins\nzwei\n \t\nvier\n")
    source = opened(root)
    assert list(pairs(source)) == ["train-1", "train-4"]
    assert source.skipped == [
        f"{root / 'train.en'}, line 2: is empty; the pair is skipped",
        f"{root / 'train.de'}, line 3: is empty; the pair is skipped",
    ]


@pytest.mark.parametrize("english, german, longer, line", [("a\nb\nc\n", "a\n", "en", 2), ("a\n", "a\nb", "de", 2)])
def test_unequal_lengths_are_named(write, english, german, longer, line):
    root = write(train_en=english, train_de=german)
    message = refusal(opened, root)
    assert message.startswith(f"{root / f'train.{longer}'}, line {line}: ") and "lines" in message
    with collect_errors():
        source = opened(root)
    assert len(pairs(source)) == 1 and source.skipped == [message]


@pytest.mark.parametrize(
    "files, options, named",
    [
        ({}, {}, "train.en: no such file"),
        ({"train_en": "a"}, {}, "train.de: no such file"),
        ({"train_en": "a", "train_de": "b"}, {"val": "dev"}, "data.source.val=null"),
        ({"train_en": "a", "train_de": "b"}, {"target": "en"}, "both are 'en'"),
        ({"train_en": "\n", "train_de": "b\n"}, {}, "has no text"),
        ({"train_en": b"a\nb\xff\n", "train_de": "a\nb\n"}, {}, "train.en, line 2: is not UTF-8"),
    ],
)
def test_faults_are_named(write, files, options, named):
    assert named in refusal(opened, write(**files), **options)


def test_a_folder_that_is_none_is_named(tmp_path):
    assert "no such folder" in refusal(opened, tmp_path / "none")
