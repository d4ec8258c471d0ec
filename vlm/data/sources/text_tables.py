"""Tables of texts with labels, or with translations; the Stanford Sentiment Treebank (SST-2)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NotRequired, Unpack

from vlm.data.records import NAMES, RowChecker, RowError, SkipMessage, report_error
from vlm.data.sources.delimited import Quoting
from vlm.data.sources.tables import Cells, ReadOptions, read_table
from vlm.data.sources.text_source import FileOptions, Sample, SampleRow, TextSource
from vlm.data.text.words import to_single_line
from vlm.errors import Injected, UserError

MISSING = {"na", "n/a", "#n/a", "<na>", "nan", "null", "none"}  # what other tools write or read as a missing value


class TableOptions(FileOptions):
    """Arguments of all tables; see TableSource."""

    split_column: NotRequired[str]
    columns: NotRequired[Sequence[str] | None]
    delimiter: NotRequired[str | None]
    quoting: NotRequired[Quoting]


class TableSource(TextSource):
    """CSV and TSV files with a header, JSON lines, or lines without a header.

    Args:
        named: Column name of each value of a sample.
        split_column: Name of the column of splits; ``split`` is optional.
        columns: Columns of files without a header, in order; the last one takes the rest of the line.
        delimiter: Delimiter of such files; default a tab.
        quoting: Whether CSV and TSV files have quoted cells; ``auto`` decides per file.
        files: See `_read`.
    Raises:
        UserError: A file or column is missing, or a row is malformed.
    """

    clean = staticmethod(str.strip)  # converts a cell to text
    optional: Sequence[str] = ()  # names of values that a row may lack

    def __init__(
        self,
        named: Mapping[str, str],
        *,
        split_column: str = "split",
        columns: Sequence[str] | None = None,
        delimiter: str | None = None,
        quoting: Quoting = "auto",
        **files: Unpack[FileOptions],
    ) -> None:
        self._columns = {f"{name}_column": column for name, column in {**named, "split": split_column}.items()}
        self._options: ReadOptions = {"names": columns, "delimiter": delimiter, "quoting": quoting}
        self.notes: list[str] = []
        self._read(**files)

    def samples(self, path: Path) -> Iterator[Sample]:
        def convert(cells: Cells) -> Iterator[Sample]:
            values = self._read_values(cells)
            values = {name: value for name, value in values.items() if value or name not in self.optional}
            empty = [name for name, value in values.items() if not value]
            if empty:
                self._skip(path, cells.position, f"no {empty[0]}", "empty text" if empty[0] != "label" else "no label")
            else:
                yield Sample(cells.position.removeprefix("line "), values, cells.split)

        options: ReadOptions = {**self._options, "optional": [f"{name}_column" for name in self.optional]}
        return read_table(RowChecker(path, self), self._columns, convert, **options)

    def _read_values(self, cells: Cells) -> dict[str, str]:
        values = {}
        for key, value in cells.values.items():
            name = key.removesuffix("_column")
            if name == "split":
                continue
            value = "" if value is None else value  # null in JSON is an empty cell
            if not isinstance(value, str) and not (name == "label" and isinstance(value, int)):  # a bool is one too
                raise RowError(f"{name} {value!r} is not text; put it in quotes")
            values[name] = self.clean(str(value))
        return values


class TextTable(TableSource):
    """Texts, or pairs of texts, with labels; a task that does not need labels reads tables without them too.

    Args:
        text_column: Name of the column of texts.
        pair_column: Name of the column of second texts; None for single texts.
        label_column: Name of the column of labels.
        needs: The values that the task reads; without ``label``, rows may have none.
        options: See TableSource; held-out samples are stratified by class.
    Raises:
        UserError: As in TableSource; or there are fewer than two labels, or val or test has one that train lacks.
    """

    holds = ("text", "label")
    name = "texts"

    def __init__(
        self,
        *,
        text_column: str = "text",
        pair_column: str | None = None,
        label_column: str = "label",
        needs: Injected[Sequence[str]] = ("text", "label"),
        **options: Unpack[TableOptions],
    ) -> None:
        self.optional = [] if "label" in needs else ["label"]
        pair = {} if pair_column is None else {"pair": pair_column}
        super().__init__({"text": text_column, **pair, "label": label_column}, **options)
        if "label" in needs:
            self._number_labels(options["path"])
        else:
            self.holds = ("text",)  # type: ignore[misc, assignment]  # narrower than the class says

    def samples(self, path: Path) -> Iterator[Sample]:
        try:
            yield from super().samples(path)
        except UserError as error:
            if not self.optional or path.suffix.lower() != ".txt":
                raise
            raise UserError(f"{error}; or read plain text, a text per line, by data=text data.path={path}") from error

    def _number_labels(self, path: str) -> None:
        """Numbers the labels in alphabetical order."""
        if "train" not in self._samples:
            raise UserError(f"{path}: has no training samples, only {' and '.join(self._samples)}; add some")
        self.classes = sorted({values["label"] for _, values in self._samples["train"]})
        if len(self.classes) < 2:
            report_error(f"{path}: has only one label, {self.classes[0]}; at least two are needed")
        for name in (name for name in self.classes if name.lower() in MISSING):
            count = sum(values["label"] == name for _, values in self._samples["train"])
            what = f"the label {name!r} of {count:,} training row{'s' * (count > 1)} is treated as a class"
            self.notes = [
                *self.notes,
                f"{path}: {what}, although other tools read it as missing; empty labels are skipped",
            ]
        labels = {name: label for label, name in enumerate(self.classes)}
        for split in NAMES:
            rows: list[SampleRow] = []
            for id, values in self._samples.get(split, []):
                name = values["label"]
                if name in labels:
                    rows.append((id, {**values, "label": labels[name], "class": name}))
                else:
                    report_error(
                        f"data: the label {name!r} of {id} in {split} is not in train; fix it, or add it to train"
                    )
            self._samples[split] = rows


class TranslationTable(TableSource):
    """Texts with translations.

    Args:
        text_column: Name of the column of texts.
        translation_column: Name of the column of translations.
        options: See TableSource.
    Raises:
        UserError: As in TableSource.
    """

    holds = ("text", "translation")
    name = "translations"
    clean = staticmethod(partial(to_single_line, keep_no_break=True))

    def __init__(
        self,
        *,
        text_column: str = "text",
        translation_column: str = "translation",
        **options: Unpack[TableOptions],
    ) -> None:
        super().__init__({"text": text_column, "translation": translation_column}, **options)


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
        self._remove_held_out_texts()
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
                self._skip(path, cells.position, "no text", "empty text")
            elif label not in CLASSES:
                raise RowError(f"the label {label!r} is neither 0 nor 1; correct it")
            else:
                yield Sample(f"{'phrase ' if phrases else ''}{cells.position}", {"text": text, "label": CLASSES[label]})

        delimiter = "\t" if phrases else " "
        return read_table(RowChecker(path, self), columns, convert, names=names, delimiter=delimiter, quoting="none")

    def _remove_held_out_texts(self) -> None:
        """Removes training texts with the same words as a dev or test sentence, regardless of punctuation."""
        held = {_words(values["text"]): split for split in ("val", "test") for _, values in self._samples[split]}
        samples = []
        for id, values in self._samples["train"]:
            split = held.get(_words(values["text"]))
            if split is None:
                samples.append((id, values))
            else:
                line = f"{id}: {values['text']!r} has the words of a sentence of {split}; it is skipped"
                self.skipped.append(SkipMessage(line, "held out"))
        self._samples["train"] = samples


def _words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text))
