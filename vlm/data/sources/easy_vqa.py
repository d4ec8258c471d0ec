"""easy-VQA: questions about drawn shapes."""

from collections.abc import Iterator
from typing import Any

from vlm.data.records import Question, RowChecker, RowError
from vlm.data.sources.caption_tables import Row
from vlm.data.sources.questions import QuestionSource
from vlm.data.sources.tables import parse_json, read_text
from vlm.errors import Count, UserError

KINDS = {"yes": "yes_no", "no": "yes_no", "circle": "shape", "rectangle": "shape", "triangle": "shape"}


class EasyVQA(QuestionSource):
    """easy-VQA (Zhou 2019): 4,000 training and 1,000 test images of one shape, with ten questions each on average.

    It has no validation split. The kind of a question is derived from its answer: yes_no, shape or color.

    Args:
        root: Folder with ``train`` and ``test``, each with ``questions.json`` and ``images``.
        seed: Seed of the choice of questions.
        questions_per_image: Maximum number of questions per image in an epoch of ``train``; None for all.
    Raises:
        UserError: A file or folder is missing or malformed.
    """

    name = "easy-vqa"

    def __init__(self, *, root: str, seed: int = 0, questions_per_image: Count | None = None) -> None:
        super().__init__(root=root, seed=seed, captions_per_image=questions_per_image)
        for split in ("train", "test"):
            path = self.root / split / "questions.json"
            if not path.is_file():
                raise UserError(f"{path}: no such file; set data.root to the folder of train and test")
            self._add(_rows(RowChecker(path, self)), path, f"{split}/images", split)
        self._finish(self.root)


def _rows(checker: RowChecker) -> Iterator[Row]:
    """Rows of a list of [question, answer, number of the image]."""
    try:
        entries = parse_json(read_text(checker.path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{checker.path}: not JSON ({error}); restore the original file") from error
    entries = entries if isinstance(entries, list) else [entries]
    return checker.read(((f"entry {n}", (f"entry {n}", entry)) for n, entry in enumerate(entries, 1)), _row)


def _row(numbered: tuple[str, Any]) -> Iterator[Row]:
    match numbered:
        case where, [str(question), str(answer), int(image)]:
            asked = Question(question.strip(), answer.strip(), KINDS.get(answer.strip(), "color"))
            yield Row(f"{image}.png", asked if asked.text and asked.answer else "", None, where)
        case _:
            raise RowError("is not [question, answer, number of the image]; restore it")
