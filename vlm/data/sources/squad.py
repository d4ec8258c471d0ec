"""Extractive question answering in SQuAD's JSON format (Rajpurkar et al. 2016, 2018)."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from vlm.data.hold_out import draw_splits
from vlm.data.records import RowChecker, RowError
from vlm.data.sources.tables import read_json
from vlm.data.sources.text_source import Sample, TextSource
from vlm.errors import Share, UserError
from vlm.untrusted.sizes import JsonValue

LAYOUT = "give a file in SQuAD's layout, data[].paragraphs[].qas[]"
# Marks of unanswerable questions: a boolean, 0 or 1, or one of these in quotes; default false.
IS_IMPOSSIBLE = {"none": False, "": False, "false": False, "0": False, "true": True, "1": True}


class Squad(TextSource):
    """Questions in the format of SQuAD 1.1, or 2.0 with unanswerable questions (``is_impossible``).

    Each answer must be at ``answer_start`` in its context, counted in Unicode code points; other questions are skipped.
    Missing splits are drawn from training by passage, so that no passage is in two splits.

    Args:
        path: The file or files; for training only if `val_path` or `test_path` is given.
        val_path: File for validation.
        test_path: File for test.
        root: Folder in which files are looked up that do not exist as given; None for none.
        val_fraction: Share of passages held out for validation if there is no file for it.
        test_fraction: Share of passages held out for test if there is only one file.
        seed: Seed of the held-out passages.
    Raises:
        UserError: A file is missing, not JSON or in another format, or has no usable question.
    """

    holds = ("question", "context", "answers")
    name = "questions about passages"

    def __init__(
        self,
        *,
        path: str | list[str],
        val_path: str | None = None,
        test_path: str | None = None,
        root: str | None = None,
        val_fraction: Share = 0.1,
        test_fraction: Share = 0.1,
        seed: int = 0,
    ) -> None:
        self._read(path=path, val_path=val_path, test_path=test_path, root=root, val_fraction=0, test_fraction=0)
        fractions = {"val": val_fraction} if test_path or val_path else {"test": test_fraction, "val": val_fraction}
        self._hold_out({name: share for name, share in fractions.items() if name not in self.splits}, seed)

    def _hold_out(self, fractions: Mapping[str, float], seed: int) -> None:
        """Draws splits from training by passage."""
        counts: Counter[str] = Counter()
        samples = []
        for id, values in self._samples["train"]:  # of several files, which may share ids
            counts[id] += 1
            samples.append((f"{id}#{counts[id]}" if counts[id] > 1 else id, values))
        parts = draw_splits([values["context"] for _, values in samples], fractions, seed)
        by_split = {name: [samples[index] for index in indices] for name, indices in parts.items()}
        if not by_split["train"]:
            raise UserError(f"data.path: of {len(samples)} questions, none remains for training; hold out less")
        self._set_splits(self._samples | by_split)

    def samples(self, path: Path) -> Iterator[Sample]:
        ids: set[str] = set()
        dropped: list[str] = []  # positions of impossible questions with answers

        def convert(row: tuple[str, str, Mapping[str, JsonValue]]) -> Iterator[Sample]:
            where, context, question = row
            id = str(question.get("id", ""))
            where = f"{where} ({id})" if id else where
            text, fault, kind = str(question.get("question", "")).strip(), "", "empty text"
            mark = question.get("is_impossible")
            impossible = IS_IMPOSSIBLE.get(str(mark).strip().lower())
            if impossible is None or isinstance(mark, list | dict | float):
                raise RowError(f"is_impossible {mark!r} is neither true nor false; correct it")
            answers = [] if impossible else _read_answers(question)
            if impossible and question.get("answers"):
                dropped.append(where)
            if not text or not context.strip():
                fault = f"no {'question' if context.strip() else 'context'}"
            elif not answers and not impossible:
                fault, kind = "no answer", "question without an answer"
            elif misplaced := [
                (answer, start)
                for answer, start in answers
                if not answer.strip() or start < 0 or context[start : start + len(answer)] != answer
            ]:
                answer, start = misplaced[0]
                fault, kind = f"the answer {answer!r} is not at {start}", "answer not in its context"
            elif not id or id in ids:
                fault, kind = "its id is repeated" if id else "no id", "question without a unique id"
            if fault:
                self._skip(path, where, f"{fault}; the question is skipped", kind)
            else:
                yield Sample(id, {"question": text, "context": context, "answers": answers})
            ids.add(id)

        checker = RowChecker(path, self)
        yield from checker.read(_read_questions(checker), convert)
        if dropped:
            what = f"{len(dropped):,} question{'s' * (len(dropped) > 1)} marked is_impossible with answers"
            self.notes = [*self.notes, f"{path}: {what} (the first: {dropped[0]}); these answers are not used"]


def _read_questions(checker: RowChecker) -> Iterator[tuple[str, tuple[str, str, Mapping[str, JsonValue]]]]:
    """Yields the position of each question in a file, and the question with its position and context."""
    path = checker.path
    content = read_json(path, "not JSON", LAYOUT)
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise UserError(f"{path}: has no list data; {LAYOUT}")
    for article_place, article in _list_entries(checker, "", content, "data"):
        for place, paragraph in _list_entries(checker, article_place, article, "paragraphs"):
            context = paragraph.get("context")
            if not isinstance(context, str):
                checker.reject(place, f"the context is not text; {LAYOUT}")
                continue
            for where, question in _list_entries(checker, place, paragraph, "qas"):
                yield where, (where, context, question)


def _read_answers(question: Mapping[str, JsonValue]) -> list[tuple[str, int]]:
    entries = question.get("answers")
    if not isinstance(entries, list):
        raise RowError(f"has no list answers; {LAYOUT}")
    answers = []
    for number, answer in enumerate(entries):
        text, start = (answer.get("text"), answer.get("answer_start")) if isinstance(answer, dict) else (None, None)
        if not isinstance(text, str) or type(start) is not int:
            raise RowError(f"answers[{number}] lacks a text or an integer answer_start; {LAYOUT}")
        answers.append((text, start))
    return answers


def _list_entries(
    checker: RowChecker, where: str, holder: Mapping[str, JsonValue], name: str
) -> Iterator[tuple[str, Mapping[str, JsonValue]]]:
    """Yields the objects of a list in an object, each with its position in the file; rejects what is neither."""
    items = holder.get(name)
    if not isinstance(items, list):
        checker.reject(where, f"has no list {name}; {LAYOUT}")
        return
    place = f"{where}.{name}" if where else name
    for number, item in enumerate(items):
        if isinstance(item, dict):
            yield f"{place}[{number}]", item
        else:
            checker.reject(f"{place}[{number}]", f"is not an object; {LAYOUT}")
