"""The Stanford Sentiment Treebank with two classes (SST-2)."""

import re
from collections.abc import Iterator
from pathlib import Path

from vlm.data.records import RowChecker, RowError, Skipped
from vlm.data.sources.tables import Cells, read_table
from vlm.data.sources.text_source import Sample
from vlm.data.sources.text_tables import TextTable
from vlm.errors import UserError

CLASSES = {"0": "negative", "1": "positive"}
PHRASES = "train_phrases.tsv"


class SST2(TextTable):
    """Sentences of film reviews, positive or negative (Socher et al. 2013).

    The files of sentences are those of Kim 2014: ``stsa.binary.train``, ``dev`` and ``test``, with one label and
    sentence per line. GLUE's training file has the phrases of the training sentences' parse trees.

    Args:
        root: Folder of the files.
        phrases: Whether to train on phrases too. Phrases with the words of a dev or test sentence are never used.
    Raises:
        UserError: A file is missing, or a line is malformed.
    """

    name = "SST-2"

    def __init__(self, *, root: str, phrases: bool = False) -> None:
        folder = Path(root)
        if not folder.is_dir():
            raise UserError(f"data.root={root}: no such folder; set it to the folder of stsa.binary.train")
        train, val, test = (folder / f"stsa.binary.{name}" for name in ("train", "dev", "test"))
        files = [train, *([folder / PHRASES] if phrases else []), val, test]
        if missing := next((path for path in files if not path.is_file()), None):
            raise UserError(f"{missing}: no such file; set data.root to a folder of SST-2")
        self._read(path=[str(path) for path in files[:-2]], val_path=str(val), test_path=str(test))
        self._leave_out_held_out()
        self._number_labels(str(train))

    def samples(self, path: Path) -> Iterator[Sample]:
        phrases = path.name == PHRASES
        names = ["sentence", "label"] if phrases else ["label", "sentence"]
        columns = {"text_column": "sentence", "label_column": "label"}

        def convert(cells: Cells) -> Iterator[Sample]:
            text, label = cells.values["text_column"].strip(), cells.values["label_column"].strip()
            if [text, label] == names:  # the header of the phrases
                return
            if not text:
                self._skip(path, cells.where, "no text", "empty text")
            elif label not in CLASSES:
                raise RowError(f"the label {label!r} is neither 0 nor 1; correct it")
            else:
                yield Sample(f"{'phrase ' if phrases else ''}{cells.where}", {"text": text, "label": CLASSES[label]})

        options = {"names": names, "delimiter": "\t" if phrases else " ", "quoting": "none"}
        return read_table(RowChecker(path, self), columns, convert, **options)

    def _leave_out_held_out(self) -> None:
        """Removes training texts with the same words as a dev or test sentence, regardless of punctuation."""
        held = {_words(known["text"]): split for split in ("val", "test") for _, known in self._samples[split]}
        kept = []
        for id, known in self._samples["train"]:
            split = held.get(_words(known["text"]))
            if split is None:
                kept.append((id, known))
            else:
                line = f"{id}: {known['text']!r} has the words of a sentence of {split}; it is skipped"
                self.skipped.append(Skipped(line, "held out"))
        self._samples["train"] = kept


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))
