"""Your own questions about images."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vlm.data.records import Question, Record, RowChecker, RowError
from vlm.data.sources.caption_source import CaptionedImage, CaptionSource
from vlm.data.sources.caption_tables import Row
from vlm.data.sources.captions import root_of, table_files
from vlm.data.sources.delimited import Quoting
from vlm.data.sources.tables import Cells, read_table
from vlm.errors import Count, Share


class QuestionSource(CaptionSource):
    """Base of sources of images with questions, which take the place of captions."""

    holds = ("image", "questions")
    text = "question and answer"

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record = super()._record(most, image, epoch)
        record.known = {"questions": record["captions"]}
        return record


class QuestionTable(QuestionSource):
    """Questions about images with answers: a CSV, TSV or JSON-lines table with one question per row.

    Splits are separate files if `val_path` or `test_path` is set, else the values of the split column, else drawn by
    image: all questions about an image are in one split.

    Args:
        question_column: Name of the column of questions.
        answer_column: Name of the column of answers; in JSON, may be a list of all answers that were given.
        image_separator: Separator of the names of several images per question, such as ``|``; null for one image.
        kind_column: Name of the column of kinds of question, which are also scored separately; null for none.
        quoting: Whether CSV and TSV files have quoted cells; ``auto`` decides per file.
        questions_per_image: Maximum number of questions per image in an epoch of ``train``; None for all.
        others: See Captions.
    Raises:
        UserError: A file, column or image is missing or malformed.
    """

    name = "questions"

    def __init__(
        self,
        *,
        path: str,
        root: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        image_column: str = "image",
        image_separator: str | None = None,
        question_column: str = "question",
        answer_column: str = "answer",
        kind_column: str | None = None,
        split_column: str = "split",
        quoting: Quoting = "auto",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        questions_per_image: Count | None = None,
    ) -> None:
        super().__init__(
            root=root_of(root, path), seed=seed, captions_per_image=questions_per_image, column=image_column
        )
        self.separator, self._quoting = image_separator, quoting
        names = {"image": image_column, "question": question_column, "answer": answer_column, "split": split_column}
        names |= {} if kind_column is None else {"kind": kind_column}
        self._columns = {f"{name}_column": column for name, column in names.items()}
        files = table_files(self.root, path, val_path, test_path)
        for split, file in files.items():
            self._add(self._rows(file), file, split=split if len(files) > 1 else None)
        self._finish(files["train"], val_fraction, test_fraction)

    def _rows(self, path: Path) -> Iterator[Row]:
        return read_table(RowChecker(path, self), self._columns, self._row, quoting=self._quoting)

    def _row(self, cells: Cells) -> Iterator[Row]:
        """A question as a caption; a question without text or answer is an empty caption."""
        values = {name: cells.values.get(f"{name}_column", "") for name in ("image", "question", "answer", "kind")}
        answers = values["answer"] if isinstance(values["answer"], list) else [values["answer"]]
        texts = [values["question"], values["kind"], *answers]
        self._mention(values["image"] if isinstance(values["image"], str) else "")
        if not all(isinstance(value, str) for value in (values["image"], *texts)):
            raise RowError("image, question and answer must be text")
        question, kind, *answers = (" ".join(text.split()) for text in texts)
        answer = Counter(answers).most_common(1)[0][0] if answers else ""  # the training target
        several = tuple(answers) if len(answers) > 1 else ()
        asked = Question(question, answer, kind, several) if question and answer else ""
        yield Row(values["image"], asked, cells.split, cells.where)
