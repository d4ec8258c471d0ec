"""Questions and conversations about images: tables, and easy-VQA."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from vlm.data.records import Question, Record, RowChecker, RowError
from vlm.data.sources.caption_source import CaptionedImage, CaptionSource
from vlm.data.sources.caption_tables import Row
from vlm.data.sources.captions import find_tables, resolve_root
from vlm.data.sources.delimited import Quoting
from vlm.data.sources.tables import Cells, read_json
from vlm.errors import Count, Injected, Share, UserError
from vlm.untrusted.sizes import JsonValue


class Conversation(tuple[Question, ...]):
    """The questions of a conversation, each with the turns before it."""

    def __str__(self) -> str:
        return " ".join(text for _, text in self[-1].turns)


class QuestionSource(CaptionSource):
    """Base of sources of images with questions or conversations, which take the place of captions."""

    holds = ("image", "questions")
    text = "question and answer"

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record = super()._record(most, image, epoch)
        entries = (entry if isinstance(entry, Conversation) else (entry,) for entry in record["captions"])
        record.values = {"questions": [question for entry in entries for question in entry]}
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
        root = resolve_root(root, path)
        super().__init__(root=root, seed=seed, captions_per_image=questions_per_image, column=image_column)
        self.separator = image_separator
        columns = {"image": image_column, "question": question_column, "answer": answer_column, "split": split_column}
        files = find_tables(self.root, path, val_path, test_path)
        self._add_tables(files, columns | _kind_column(kind_column), self._rows, quoting=quoting)
        self._finish(files["train"], val_fraction, test_fraction)

    def _rows(self, cells: Cells) -> Iterator[Row]:
        """A question as a caption; a question without text or answer is an empty caption."""
        values = {name: cells.values.get(f"{name}_column", "") for name in ("image", "question", "answer", "kind")}
        answers = values["answer"] if isinstance(values["answer"], list) else [values["answer"]]
        texts = [values["question"], values["kind"], *answers]
        self._mention(values["image"] if isinstance(values["image"], str) else "")
        if not all(isinstance(value, str) for value in (values["image"], *texts)):
            raise RowError("image, question and answer must be text")
        question, kind, *answers = (" ".join(text.split()) for text in texts)
        answer = Counter(answers).most_common(1)[0][0] if answers else ""  # the training target
        all_answers = tuple(answers) if len(answers) > 1 else ()
        caption = Question(question, answer, kind, all_answers) if question and answer else ""
        yield Row(values["image"], caption, cells.split, cells.position)


IMAGE_MARK = "<image>"  # marks an image in the text of a turn
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
TURN_KEYS = (("from", "value"), ("role", "content"))  # keys of a turn's role and content
SEPARATOR = "\0"  # between the names of several images


class Conversations(QuestionSource):
    """Conversations about images: JSON lines, a JSON array, or Parquet, with one conversation per row.

    Turns are {"from": "human" or "gpt", "value": ...} (LLaVA), {"role": "user", "assistant" or "system",
    "content": ...}, or pairs {"user": ..., "assistant": ...} (the Cauldron). There is a mark <image> per image, or
    none. All conversations about the same images form one record.

    Args:
        needs: The values that the task reads; without ``image``, rows may have none.
        image_column: Name of the column of images, or several separated by ``|``; a cell has one image or a list.
        conversation_column: The same for the column of turns.
        kind_column: Name of the column of kinds of conversation, which are also scored separately; null for none.
        conversations_per_image: Maximum number of conversations per image in an epoch of ``train``; None for all.
        others: See Captions.
    Raises:
        UserError: A file is missing, or more than 1% of its rows are invalid or name missing images.
    """

    text = "conversation"
    empty = "no answer in the conversation"
    has_turns = True
    name = "conversations"
    separator = SEPARATOR

    def __init__(
        self,
        *,
        path: str,
        root: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        image_column: str = "images|image",
        conversation_column: str = "conversations|messages|texts",
        kind_column: str | None = None,
        split_column: str = "split",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        conversations_per_image: Count | None = None,
        needs: Injected[Sequence[str]] = ("image", "questions"),
    ) -> None:
        root = resolve_root(root, path)
        self.keeps_texts = "image" not in needs
        super().__init__(root=root, seed=seed, captions_per_image=conversations_per_image, column=image_column)
        columns = {"image": image_column, "conversation": conversation_column, "split": split_column}
        files = find_tables(self.root, path, val_path, test_path)
        self._empty_answers: list[str] = []  # positions of conversations, once per answer
        self._add_tables(files, columns | _kind_column(kind_column), self._rows, optional=["image_column"])
        if count := len(self._empty_answers):
            what = f"{count:,} assistant turn{'s' * (count > 1)} without text (the first: {self._empty_answers[0]})"
            self.notes.append(f"{files['train']}: {what}; an empty turn is left out of its conversation")
        self._finish(files["train"], val_fraction, test_fraction)

    def _rows(self, cells: Cells) -> Iterator[Row]:
        """A conversation as a caption; a conversation without an answer is an empty caption."""
        kind = cells.values.get("kind_column", "")
        images = read_image_names(cells)
        if not isinstance(kind, str):
            raise RowError("images and kinds must be text")
        name = SEPARATOR.join(images)
        self._mention(name)
        turns = read_turns(cells.values["conversation_column"], "the conversation")
        if (
            images or self.keeps_texts
        ):  # a row without an image is skipped as such, unless texts without images are read
            check_marks(turns, len(images))
        conversation = build_conversation([(role, *remove_marks(role, text)) for role, text in turns], kind)
        if conversation:  # others are skipped and named
            self._empty_answers += [cells.position for role, text in turns if role == "assistant" and not text.strip()]
        yield Row(name, conversation, cells.split, cells.position)


def _kind_column(column: str | None) -> dict[str, str]:
    return {} if column is None else {"kind": column}


def read_image_names(cells: Cells) -> list[str]:
    """The names of a row's images; raises RowError if they are not text."""
    images = cells.values.get("image_column") or []
    images = images if isinstance(images, list) else [images]
    if not all(isinstance(name, str) for name in images):
        raise RowError("images and kinds must be text")
    return [name.strip() for name in images]


def read_turns(content: JsonValue, name: str) -> list[tuple[str, str]]:
    """The role and the text of each turn of a conversation, with the marks of its images.

    Args:
        name: Noun for the conversation, for messages.
    Raises:
        RowError: It is not a list of turns of a supported form.
    """
    if not isinstance(content, list):
        raise RowError(f"{name} is not a list of turns")
    turns: list[tuple[str, str]] = []
    for turn in content:
        if not isinstance(turn, Mapping):
            raise RowError(f"{name} is not a list of turns")
        turns += [(role, _join_parts(part)) for role, part in _roles_and_contents(turn)]
    return turns


def check_marks(turns: Sequence[tuple[str, str]], images: int) -> None:
    """Raises RowError unless the user's turns have a mark per image, or none."""
    marks = sum(text.count(IMAGE_MARK) for role, text in turns if role == "user")  # an answer may mention the mark
    if marks not in (0, images):
        raise RowError(f"its turns have {marks} {IMAGE_MARK} for {images} images")


def _roles_and_contents(turn: Mapping[str, JsonValue]) -> list[tuple[str, JsonValue]]:
    """The role and the content of a turn, in any of the three forms; a pair has two."""
    for role_key, content_key in TURN_KEYS:
        if role_key in turn and content_key in turn:
            role = turn[role_key]
            if not isinstance(role, str) or role not in ROLES:
                raise RowError(f"a turn has the role {str(role)!r:.40}; supported roles are {', '.join(ROLES)}")
            return [(ROLES[role], turn[content_key])]
    if not {"user", "assistant"} <= turn.keys():
        raise RowError("a turn has neither from and value, nor role and content, nor user and assistant")
    return [("user", turn["user"]), ("assistant", turn["assistant"])]


def _join_parts(content: JsonValue) -> str:
    """The text of a turn, which may consist of parts: {"type": "text", "text": ...} or {"type": "image", ...}."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("the content of a turn is not text")
    texts = []
    for part in content:
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (part, None)
        if kind in ("image", "image_url") and not text:
            texts.append(IMAGE_MARK)
        elif kind in ("text", None) and isinstance(text, str):
            texts.append(text)
        else:
            raise RowError(f"a turn has a part of type {str(kind)!r:.40}; supported types are text and image")
    return " ".join(texts)


def remove_marks(role: str, text: str) -> tuple[str, tuple[int, ...]]:
    """The text of a turn without marks of images, and the number of characters before each image."""
    first, *later = text.split(IMAGE_MARK)
    places: list[int] = []
    for part in later if role == "user" else ():
        places.append((places[-1] if places else 0) + len(first))
        first = part
    whole = text.replace(IMAGE_MARK, "")
    before = len(whole) - len(whole.lstrip())
    stripped = whole.strip()
    return stripped, tuple(min(max(0, place - before), len(stripped)) for place in places)


def drop_leading(turns: Sequence[tuple[str, str]], places: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """The places of images, or nothing if all of them are where images are by default: before the first user turn."""
    first = next((turn for turn, (role, _) in enumerate(turns) if role == "user"), 0)
    is_default = all(not any(row) if turn == first else not row for turn, row in enumerate(places))
    return () if is_default else tuple(places)


def build_conversation(turns: Sequence[tuple[str, str, tuple[int, ...]]], kind: str = "") -> Conversation:
    """The questions of a conversation, each with the turns before it; empty if it has no answer.

    Args:
        turns: Role, text and places of images of each turn. A turn with neither text nor image is left out.
    Raises:
        RowError: An answer has no question before it.
    """
    questions: list[Question] = []
    before: list[tuple[str, str]] = []
    places: list[tuple[int, ...]] = []
    for role, text, images in turns:
        if role == "assistant" and text:
            if not before or before[-1][0] != "user":
                raise RowError("an answer has no question before it")
            questions.append(Question(before[-1][1], text, kind, (), tuple(before[:-1]), drop_leading(before, places)))
        if text or images:
            before.append((role, text))
            places.append(images)
    return Conversation(questions)


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
            entries = read_json(path, "not JSON", "restore the original file")
            entries = entries if isinstance(entries, list) else [entries]
            numbered = ((f"entry {n}", (f"entry {n}", entry)) for n, entry in enumerate(entries, 1))
            self._add(RowChecker(path, self).read(numbered, _easy_vqa_row), path, f"{split}/images", split)
        self._finish(self.root)


def _easy_vqa_row(numbered: tuple[str, JsonValue]) -> Iterator[Row]:
    match numbered:
        case where, [str(question), str(answer), int(image)]:
            entry = Question(question.strip(), answer.strip(), KINDS.get(answer.strip(), "color"))
            yield Row(f"{image}.png", entry if entry.text and entry.answer else "", None, where)
        case _:
            raise RowError("is not [question, answer, image number]; restore the original file")
