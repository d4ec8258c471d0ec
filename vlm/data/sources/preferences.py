"""Pairs of answers to the same prompt, one of which people prefer."""

from collections.abc import Iterator, Sequence

from vlm.data.records import Preference, Record, RowError
from vlm.data.sources.caption_source import CaptionedImage, CaptionSource
from vlm.data.sources.caption_tables import Row
from vlm.data.sources.captions import find_tables, resolve_root
from vlm.data.sources.questions import (
    SEPARATOR,
    check_marks,
    drop_leading,
    read_image_names,
    read_turns,
    remove_marks,
)
from vlm.data.sources.tables import Cells
from vlm.errors import Count, Injected, Share
from vlm.untrusted.sizes import JsonValue

Turns = list[tuple[str, str]]


class PreferenceTable(CaptionSource):
    """Chosen and rejected answers, as TRL's preference data: JSON lines, a JSON array, Parquet, CSV; a pair per row.

    ``prompt``, ``chosen`` and ``rejected`` are texts, or lists of messages as in `Conversations`. The prompt may also
    be a part of chosen and rejected, which are whole conversations then and differ in the last turn only. Without any
    prompt, the answers are captions of the row's image. All pairs about the same images form one record.

    Args:
        needs: The values that the task reads; without ``image``, rows may have none.
        image_column: Name of the column of images, or several separated by ``|``; a cell has one image or a list.
        prompt_column: Name of the column of prompts, which may be absent.
        chosen_column, rejected_column: Names of the columns of answers.
        pairs_per_image: Maximum number of pairs per image in an epoch of ``train``; None for all.
        others: See Captions.
    Raises:
        UserError: A file is missing, or more than 1% of its rows are invalid or name missing images.
    """

    holds = ("image", "pairs")
    text = "pair of answers"
    name = "preferences"
    has_turns = True
    separator = SEPARATOR

    def __init__(
        self,
        *,
        path: str,
        root: str | None = None,
        val_path: str | None = None,
        test_path: str | None = None,
        image_column: str = "images|image",
        prompt_column: str = "prompt",
        chosen_column: str = "chosen",
        rejected_column: str = "rejected",
        split_column: str = "split",
        val_fraction: Share = 0.05,
        test_fraction: Share = 0.05,
        seed: int = 0,
        pairs_per_image: Count | None = None,
        needs: Injected[Sequence[str]] = ("image", "pairs"),
    ) -> None:
        root = resolve_root(root, path)
        self.keeps_texts = "image" not in needs
        super().__init__(root=root, seed=seed, captions_per_image=pairs_per_image, column=image_column)
        columns = {"image": image_column, "prompt": prompt_column, "split": split_column}
        columns |= {"chosen": chosen_column, "rejected": rejected_column}
        files = find_tables(self.root, path, val_path, test_path)
        self._add_tables(files, columns, self._rows, optional=["image_column", "prompt_column"])
        self._finish(files["train"], val_fraction, test_fraction)

    def _record(self, most: int | None, image: CaptionedImage, epoch: int) -> Record:
        record = super()._record(most, image, epoch)
        record.values = {"pairs": record["captions"]}
        return record

    def _rows(self, cells: Cells) -> Iterator[Row]:
        images = read_image_names(cells)
        name = SEPARATOR.join(images)
        self._mention(name)
        answers = {key: _read_answer(cells.values[f"{key}_column"], key) for key in ("chosen", "rejected")}
        prompt = _read_prompt(cells.values.get("prompt_column"), *(turns for turns, _ in answers.values()))
        if images or self.keeps_texts:
            check_marks(prompt, len(images))
        if not prompt and not images:
            raise RowError("has neither a prompt nor an image")
        texts = {key: remove_marks("assistant", text)[0] for key, (_, text) in answers.items()}
        if empty := [key for key, text in texts.items() if not text]:
            raise RowError(f"{empty[0]} is an empty answer")
        if texts["chosen"] == texts["rejected"]:
            raise RowError("chosen equals rejected")
        turns = [(role, *remove_marks(role, text)) for role, text in prompt]
        before, places = [(role, text) for role, text, _ in turns], [row for _, _, row in turns]
        pair = Preference(tuple(before), texts["chosen"], texts["rejected"], drop_leading(before, places))
        yield Row(name, pair, cells.split, cells.position)


def _read_answer(cell: JsonValue, name: str) -> tuple[Turns, str]:
    """The turns before an answer, if the cell has any, and the answer; raises RowError if there is none."""
    if isinstance(cell, str):
        return [], cell
    turns = read_turns(cell, name)
    if not turns or turns[-1][0] != "assistant":
        raise RowError(f"{name} does not end with a turn of the assistant")
    return turns[:-1], turns[-1][1]


def _read_prompt(cell: JsonValue, chosen: Turns, rejected: Turns) -> Turns:
    """The turns of a prompt.

    Args:
        cell: The cell of the prompt, a text or messages; None or empty if there is none.
        chosen, rejected: The turns before the answers in their own cells.
    Raises:
        RowError: The prompts of the two answers differ, or the prompt does not end with the user's turn.
    """
    if chosen != rejected:
        raise RowError("the prompts of chosen and rejected differ")
    prompt = [("user", cell)] if isinstance(cell, str) and cell else read_turns(cell or [], "the prompt")
    if prompt and chosen and prompt != chosen:
        raise RowError("chosen and rejected have other turns before the answer than the prompt has")
    prompt = prompt or chosen
    if prompt and prompt[-1][0] != "user":
        raise RowError("the prompt does not end with a turn of the user")
    return prompt
