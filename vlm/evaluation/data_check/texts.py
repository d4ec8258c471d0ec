"""Checks texts, their labels and their translations for problems before training."""

from collections import Counter
from collections.abc import Mapping

from vlm.data.records import Record, Split
from vlm.data.text.inputs import EncodedField
from vlm.data.text.passages import find_covering_words, find_words, normalize_answer
from vlm.data.text.tokenizer import Tokenizer
from vlm.evaluation.data_check.faults import Faults, cover

MAX_CHARACTERS = 60  # characters of a text


def find_text_faults(
    splits: Mapping[str, Split],
    field: EncodedField,
    faults: Faults,
    *,
    limit: int | None,
    drawn: bool,
    unit: str = "text",
) -> dict[str, float]:
    """Finds texts that are duplicate, in two splits or two classes, too long, or unknown to the tokenizer.

    Args:
        field: Reads the texts.
        drawn: Whether a program writes them, which writes some of them again by nature.
        unit: "sentence" for a corpus of sentences, which may recur in another split; else "text".
    Returns:
        The share of tokens of each split that the tokenizer knows.
    """
    first_places: dict[tuple[str, ...], tuple[str, str, object]] = {}
    coverage = {}
    for name, split in splits.items():
        texts, rows = [], []
        for record in split.records(limit):
            sample_texts = tuple(field.texts_of(record))
            here = name, record.id, record.values.get("label")
            first = first_places.setdefault(sample_texts, here)
            message = f"{first[0]}: {first[1]} = {name}: {record.id}: {' | '.join(sample_texts)[:MAX_CHARACTERS]}"
            is_repeated, crosses_splits = first != here, first[0] != name
            recurs = drawn and unit == "sentence"  # short sentences of a grammar
            faults.add(f"{unit} in two splits", [message] if is_repeated and crosses_splits and not recurs else [], 1)
            faults.add("duplicate text", [message] if is_repeated and not crosses_splits and not drawn else [], 1)
            faults.add("one text in two classes", [message] if is_repeated and first[2] != here[2] else [], 1)
            ids = [field.tokenizer.encode(text) for text in sample_texts]
            length = sum(map(len, ids)) + len(ids) + 1
            excerpt = sample_texts[0][:MAX_CHARACTERS]
            long = f"{name}: {record.id}: {length} tokens, more than data.max_len={field.max_len}: {excerpt}"
            faults.add("over-long text", [long] if field.cuts and length > field.max_len else [], 1)
            texts += [(record.id, text) for text in sample_texts]
            rows += ids
        coverage[name] = cover(name, texts, rows, field.tokenizer, faults)
    return coverage


def find_tag_faults(splits: Mapping[str, Split], faults: Faults, *, limit: int | None) -> list[str]:
    """Finds words whose tag is not in training; returns a line on the tags."""
    train_tags = Counter(tag for record in splits["train"].records(limit) for tag in record["tags"])
    for name, split in splits.items():
        for record in split.records(limit):
            pairs = zip(record["words"], record["tags"], strict=True)
            lines = [f"{name}: {record.id}: {word}/{tag}" for word, tag in pairs if tag not in train_tags]
            faults.add("tag that train lacks", lines, len(record["tags"]))
    (commonest, often), (rarest, seldom) = train_tags.most_common()[0], train_tags.most_common()[-1]
    return [f"tags        {len(train_tags)}; {seldom:,} words of {rarest} to {often:,} of {commonest}"]


def find_answer_faults(splits: Mapping[str, Split], faults: Faults, *, limit: int | None, drawn: bool) -> list[str]:
    """Finds contexts in two splits, and answers that are not whole words of their context; returns a line on answers.

    Args:
        drawn: Whether they are generated, so that repeated contexts are expected.
    """
    split_by_context: dict[str, str] = {}
    counts = Counter[str]()
    for name, split in splits.items():
        for record in split.records(limit):
            context = record["context"]
            first = split_by_context.setdefault(context, name)
            messages = (
                [f"{first} = {name}: {record.id}: {context[:MAX_CHARACTERS]}"] if first != name and not drawn else []
            )
            faults.add("context in two splits", messages, 1)
            cut_answers = (text for text, start in record["answers"] if _is_cut(context, text, start))
            lines = [f"{name}: {record.id}: {text[:MAX_CHARACTERS]!r}" for text in cut_answers]
            faults.add("answer that is no whole words", lines, len(record["answers"]))
            counts.update(questions=1, answerable=bool(record["answers"]))
    return [f"questions   {counts['questions']:,}; {counts['questions'] - counts['answerable']:,} without an answer"]


def _is_cut(context: str, text: str, start: int) -> bool:
    """Returns True for an answer that differs from the whole words of the context around it."""
    words = find_words(context)
    span = find_covering_words(words, start, start + len(text))
    covered = "" if span is None else context[words[span[0]].start : words[span[1]].stop]
    return normalize_answer(covered) != normalize_answer(text)


RATIO = 3  # ratio of lengths in characters above which a pair may be wrong
SHORT = 20  # characters up to which any ratio is accepted
SIDES = ("text", "translation")


def find_pair_faults(
    splits: Mapping[str, Split], tokenizer: Tokenizer, max_len: int, faults: Faults, *, limit: int | None, drawn: bool
) -> dict[str, float]:
    """Finds pairs that are duplicate, in two splits, of unlike lengths, too long, or unknown to the tokenizer.

    Args:
        drawn: Whether they are generated, so that short ones recur, in other splits too.
    Returns:
        The share of tokens of each split that the tokenizer knows.
    """
    first_places: dict[tuple[str, ...], tuple[str, str]] = {}
    coverage = {}
    for name, split in splits.items():
        texts, rows = [], []
        for record in split.records(limit):
            pair = tuple(record[side] for side in SIDES)
            here = name, record.id
            first = first_places.setdefault(pair, here)
            message = f"{first[0]}: {first[1]} = {name}: {record.id}: {' | '.join(pair)[:MAX_CHARACTERS]}"
            faults.add("pair in two splits", [message] if first[0] != name and not drawn else [], 1)
            is_repeated = first != here and first[0] == name and not drawn
            faults.add("duplicate pair", [message] if is_repeated else [], 1)
            faults.add(
                "pair of unlike lengths",
                [f"{name}: {unlike}"] if (unlike := describe_unlike_lengths(record)) else [],
                1,
            )
            ids = [tokenizer.encode(text) for text in pair]
            longest = max(map(len, ids)) + 2
            long = (
                f"{name}: {record.id}: {longest} tokens, more than data.max_len={max_len}: {pair[0][:MAX_CHARACTERS]}"
            )
            faults.add("over-long text", [long] if longest > max_len else [], 1)
            texts += [(record.id, text) for text in pair]
            rows += ids
        coverage[name] = cover(name, texts, rows, tokenizer, faults)
    return coverage


def describe_unlike_lengths(record: Record) -> str:
    """Returns a line on a pair if one side is much longer than the other; else ""."""
    text, translation = (record[side] for side in SIDES)
    short, long = sorted((len(text), len(translation)))
    if long <= SHORT or long <= RATIO * short:
        return ""
    excerpts = " | ".join(side[:MAX_CHARACTERS] for side in (text, translation))
    return f"{record.id}: {len(text)} and {len(translation)} characters: {excerpts}"
