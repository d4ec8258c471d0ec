"""Checks texts, their labels and their translations for problems before training."""

from collections import Counter
from collections.abc import Mapping

from vlm.data.records import Split
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
    is_generated: bool,
    unit: str = "text",
) -> dict[str, float]:
    """Finds texts that are duplicate, in two splits or two classes, too long, or unknown to the tokenizer.

    Args:
        field: Reads the texts.
        is_generated: Whether a program writes the texts, so that some are expected to recur.
        unit: "sentence" for a corpus of sentences, which may recur in another split; else "text".
    Returns:
        The share of tokens of each split that the tokenizer knows.
    """
    first_places: dict[tuple[str, ...], tuple[str, str, int | None]] = {}
    coverage = {}
    for name, split in splits.items():
        texts, rows = [], []
        for record in split.records(limit):
            sample_texts = tuple(field.texts_of(record))
            here = name, record.id, record.values.get("label")
            first = first_places.setdefault(sample_texts, here)
            message = f"{first[0]}: {first[1]} = {name}: {record.id}: {' | '.join(sample_texts)[:MAX_CHARACTERS]}"
            is_repeated, crosses_splits = first != here, first[0] != name
            recurs = is_generated and unit == "sentence"  # short sentences of a grammar
            faults.add(f"{unit} in two splits", [message] if is_repeated and crosses_splits and not recurs else [], 1)
            is_duplicate = is_repeated and not crosses_splits and not is_generated
            faults.add("duplicate text", [message] if is_duplicate else [], 1)
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


def find_answer_faults(
    splits: Mapping[str, Split], faults: Faults, *, limit: int | None, is_generated: bool
) -> list[str]:
    """Finds contexts in two splits, and answers that are not whole words of their context; returns a line on answers.

    Args:
        is_generated: Whether a program writes the contexts, so that some are expected to recur.
    """
    split_by_context: dict[str, str] = {}
    counts = Counter[str]()
    for name, split in splits.items():
        for record in split.records(limit):
            context = record["context"]
            first = split_by_context.setdefault(context, name)
            message = f"{first} = {name}: {record.id}: {context[:MAX_CHARACTERS]}"
            faults.add("context in two splits", [message] if first != name and not is_generated else [], 1)
            words, lines = find_words(context), []
            for text, start in record["answers"]:
                span = find_covering_words(words, start, start + len(text))
                covered = "" if span is None else context[words[span[0]].start : words[span[1]].stop]
                if normalize_answer(covered) != normalize_answer(text):
                    lines.append(f"{name}: {record.id}: {text[:MAX_CHARACTERS]!r}")
            faults.add("answer that does not consist of whole words", lines, len(record["answers"]))
            counts.update(questions=1, answerable=bool(record["answers"]))
    return [f"questions   {counts['questions']:,}; {counts['questions'] - counts['answerable']:,} without an answer"]


RATIO = 3  # ratio of lengths in characters above which a pair may be wrong
SHORT = 20  # characters up to which any ratio is accepted


def find_pair_faults(
    splits: Mapping[str, Split],
    tokenizer: Tokenizer,
    max_len: int,
    faults: Faults,
    *,
    limit: int | None,
    is_generated: bool,
) -> dict[str, float]:
    """Finds pairs that are duplicate, in two splits, of unlike lengths, too long, or unknown to the tokenizer.

    Args:
        is_generated: Whether a program writes the pairs, so that short ones are expected to recur.
    Returns:
        The share of tokens of each split that the tokenizer knows.
    """
    first_places: dict[tuple[str, ...], tuple[str, str]] = {}
    coverage = {}
    for name, split in splits.items():
        texts, rows = [], []
        for record in split.records(limit):
            pair = tuple(record[side] for side in ("text", "translation"))
            here = name, record.id
            first = first_places.setdefault(pair, here)
            message = f"{first[0]}: {first[1]} = {name}: {record.id}: {' | '.join(pair)[:MAX_CHARACTERS]}"
            faults.add("pair in two splits", [message] if first[0] != name and not is_generated else [], 1)
            is_repeated = first != here and first[0] == name and not is_generated
            faults.add("duplicate pair", [message] if is_repeated else [], 1)
            excerpts = [text[:MAX_CHARACTERS] for text in pair]
            lengths = [len(text) for text in pair]
            unlike = f"{name}: {record.id}: {lengths[0]} and {lengths[1]} characters: {' | '.join(excerpts)}"
            is_unlike = max(lengths) > SHORT and max(lengths) > RATIO * min(lengths)
            faults.add("pair of unlike lengths", [unlike] if is_unlike else [], 1)
            ids = [tokenizer.encode(text) for text in pair]
            longest = max(map(len, ids)) + 2
            long = f"{name}: {record.id}: {longest} tokens, more than data.max_len={max_len}: {excerpts[0]}"
            faults.add("over-long text", [long] if longest > max_len else [], 1)
            texts += [(record.id, text) for text in pair]
            rows += ids
        coverage[name] = cover(name, texts, rows, tokenizer, faults)
    return coverage
