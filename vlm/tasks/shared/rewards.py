"""Rewards of sampled texts: metrics of texts, functions of the user, and weighted sums of both."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from vlm.config.target import find_function
from vlm.data.boxes import BoxPrompt
from vlm.data.records import Question, Split
from vlm.errors import UserError, did_you_mean, excerpt, find_similar
from vlm.evaluation.metrics.coco import KEYS, References
from vlm.evaluation.metrics.ngrams import DocumentFrequencies, Floats
from vlm.evaluation.metrics.tokens import units_of
from vlm.training.config.check import REWARD_ARGUMENTS

CONSTANT, EXACT, LENGTH = "cider_constant", "exact_match", "length"
TEXT_REWARDS = (*KEYS, CONSTANT, EXACT, LENGTH)
LIKELIHOOD = "likelihood"  # of the references, by next-token prediction
TRIED = 64  # training samples whose references a user's function rewards before training
T = TypeVar("T")


class Target(NamedTuple):
    """What a prompt asks for.

    Args:
        prompt: Its text; empty for captions.
        references: Right texts.
        boxes: The right objects; None for a task without boxes.
    """

    prompt: str
    references: list[str]
    boxes: BoxPrompt | None = None


def list_targets(references: Sequence[Any]) -> list[Target]:
    """Returns the target of each prompt of a sample.

    Args:
        references: Those that its field gives: captions of one prompt, questions, or prompts for boxes.
    """
    if references and isinstance(references[0], Question):
        return [
            Target(question.text, [*dict.fromkeys([question.answer, *question.answers])]) for question in references
        ]
    if references and isinstance(references[0], BoxPrompt):
        return [Target(boxes.prompt, [boxes.text], boxes) for boxes in references]
    return [Target("", list(references))]


class SampledTexts(NamedTuple):
    """K texts for each of P prompts.

    Args:
        ids: Id of each prompt's record.
        targets: What each prompt asks for.
        texts: P lists of K texts.
        tokens: Their tokens, without end tokens.
    """

    ids: Sequence[str]
    targets: Sequence[Target]
    texts: Sequence[Sequence[str]]
    tokens: Sequence[Sequence[Sequence[int]]] = ()


class Reward(Protocol):
    """A reward of sampled texts."""

    def __call__(self, samples: SampledTexts) -> Floats:
        """Returns the reward of each text: (P, K)."""


class TextReward:
    """A weighted sum of metrics of each single text: those of COCO, and three of our own.

    cider_constant is the mean CIDEr of a text over all training samples. With a negative weight it subtracts what the
    text would earn for any image (after Wang et al. 2020, "Compare and Reweight", who subtract what it earns for
    similar images). exact_match is 1 for a text that equals a reference word for word, else 0. length is the quotient
    of the numbers of words of text and reference, the smaller by the larger, for the reference of the nearest length.

    Args:
        weights: Weight of each metric in `TEXT_REWARDS`.
        corpus: References of each training prompt, by which CIDEr weighs n-grams; read only for metrics that need it.
    """

    def __init__(self, weights: Mapping[str, float], corpus: Iterable[Sequence[str]]) -> None:
        self.weights = weights
        if not weights.keys() - {EXACT}:
            return
        references = [list(texts) for texts in corpus]
        self.units = units_of(chain.from_iterable(references))
        if weights.keys() & {*KEYS, CONSTANT}:
            cut = ([*map(self.units.cut, texts)] for texts in references)
            self.frequencies = DocumentFrequencies.from_references(cut)
        if CONSTANT in weights:
            self._corpus = References(_name_in_order(references), units=self.units)

    def __call__(self, samples: SampledTexts) -> Floats:
        texts, references = samples.texts, [target.references for target in samples.targets]
        rewards = self._score_by_coco(texts, references)
        if weight := self.weights.get(CONSTANT):
            constants = self._corpus.cider_of_constants(list(chain.from_iterable(texts)))
            rewards += weight * constants.reshape(rewards.shape)
        if weight := self.weights.get(EXACT):
            rewards += weight * _score_each(texts, references, is_exact)
        if weight := self.weights.get(LENGTH):
            rewards += weight * _score_each(texts, references, self._compare_lengths)
        return rewards

    def _score_by_coco(self, texts: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> Floats:
        names = self.weights.keys() & set(KEYS)
        if not names:
            return np.zeros((len(texts), len(texts[0])))
        if names == {"cider"}:
            return self.weights["cider"] * self._score_columns(texts, references, References.cider)
        weights = np.array([self.weights.get(name, 0.0) for name in KEYS])
        return self._score_columns(texts, references, lambda prepared, column: prepared.score(column).values @ weights)

    def _score_columns(
        self,
        texts: Sequence[Sequence[str]],
        references: Sequence[Sequence[str]],
        score: Callable[[References, Mapping[str, str]], Floats],
    ) -> Floats:
        """Returns the score of each text: (P, K)."""
        cut = map(self.units.cut, chain(chain.from_iterable(texts), chain.from_iterable(references)))
        prepared = References(_name_in_order(references), self.frequencies.among(cut), self.units)
        columns = [_name_in_order(column) for column in zip(*texts, strict=True)]
        return np.stack([score(prepared, column) for column in columns], 1)

    def _compare_lengths(self, text: str, references: Sequence[str]) -> float:
        count = len(self.units.cut(text))
        lengths = [len(self.units.cut(reference)) for reference in references]
        return max((min(count, other) / max(count, other, 1) if count != other else 1.0) for other in lengths)


def is_exact(text: str, references: Sequence[str]) -> bool:
    """Returns True if a text equals a reference word for word."""
    return text.split() in map(str.split, references)


def _score_each(
    texts: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    score: Callable[[str, Sequence[str]], float],
) -> Floats:
    rows = zip(texts, references, strict=True)
    return np.array([[float(score(text, right)) for text in row] for row, right in rows])


def _name_in_order(values: Sequence[T]) -> dict[str, T]:
    """Returns values by names that sort in their order."""
    return {f"{place:09}": value for place, value in enumerate(values)}


class FunctionReward:
    """A reward that a function of the user computes.

    It is called once for all texts of a batch, as ``function(texts=..., references=..., prompts=..., ids=...)`` with a
    list of each, and returns one finite number per text. A text's references are a list.

    Args:
        name: PACKAGE.FUNCTION.
    Raises:
        UserError: The package is not trusted, or has no such function, or it does not take these arguments.
    """

    def __init__(self, name: str) -> None:
        try:
            self.name, self.function = name, find_function(name, REWARD_ARGUMENTS)
        except UserError as error:
            raise UserError(f"task.reward: {error}") from error

    def __call__(self, samples: SampledTexts) -> Floats:
        """Returns the reward of each text: (P, K).

        Raises:
            UserError: The function raises, or does not return one finite number per text.
        """
        count = len(samples.texts[0])
        rows = [
            (text, list(target.references), target.prompt, id)
            for id, target, texts in zip(samples.ids, samples.targets, samples.texts, strict=True)
            for text in texts
        ]
        try:
            returned = self._call(rows)
        except Exception as error:  # of the user's code
            raise self._locate_error(rows, error) from error
        try:
            values = np.asarray([float(value) for value in returned])
        except (TypeError, ValueError):
            what = f"returned {type(returned).__name__}, not one number per text; return a list of numbers"
            raise self._error(rows[0], what) from None
        if len(values) != len(rows):
            raise self._error(rows[0], f"returned {len(values)} numbers for {len(rows)} texts; return one per text")
        if len(bad := np.flatnonzero(~np.isfinite(values))):
            raise self._error(rows[bad[0]], f"returned {values[bad[0]]}; return a finite number")
        return values.reshape(-1, count)

    def _call(self, rows: Sequence[tuple[str, list[str], str, str]]) -> Any:
        return self.function(**dict(zip(REWARD_ARGUMENTS, map(list, zip(*rows, strict=True)), strict=True)))

    def _locate_error(self, rows: Sequence[tuple[str, list[str], str, str]], error: Exception) -> UserError:
        """Returns the error with the first text on its own that raises one."""
        for row in rows:
            try:
                self._call([row])
            except Exception as found:
                return self._error(row, f"raised {type(found).__name__}: {found}; correct it")
        return self._error(rows[0], f"raised {type(error).__name__} for a batch of {len(rows)} texts: {error}")

    def _error(self, row: tuple[str, list[str], str, str], what: str) -> UserError:
        text, _, _, id = row
        return UserError(f"task.reward: {self.name}, row {id}, text {excerpt(text)!r}: {what}")


class WeightedReward:
    """The sum of a reward of ours and of functions of the user.

    Args:
        metrics: The sum of ours; None for none.
        functions: Functions with their weights.
    """

    def __init__(self, metrics: Reward | None, functions: Sequence[tuple[FunctionReward, float]]) -> None:
        self.metrics, self.functions = metrics, functions

    def __call__(self, samples: SampledTexts) -> Floats:
        parts = [] if self.metrics is None else [self.metrics(samples)]
        parts += [weight * function(samples) for function, weight in self.functions]
        return sum(parts[1:], parts[0])


def read_weights(reward: str | Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Returns the weight of each part of a reward; a name with a dot is a function of the user.

    Args:
        names: The rewards of ours that a task has.
    Raises:
        UserError: A name is unknown, or nothing is rewarded.
    """
    weights = {reward: 1.0} if isinstance(reward, str) else dict(reward)
    if unknown := sorted(name for name in weights if name not in (*names, LIKELIHOOD) and "." not in name):
        near = did_you_mean(find_similar(unknown[0], names))
        known = ", ".join([*names, LIKELIHOOD])
        raise UserError(f"task.reward: {unknown[0]}: unknown; use {known}, or PACKAGE.FUNCTION{near}")
    if not weights.keys() - {LIKELIHOOD}:
        raise UserError(f"task.reward: names no reward; use {', '.join(names)}, or PACKAGE.FUNCTION")
    return weights


def try_functions(weights: Mapping[str, float], field: Any, split: Split) -> None:
    """Rewards references of training samples by each function of the user.

    Args:
        weights: Weight of each part of a reward.
        field: The field that reads the references.
    Raises:
        UserError: As `FunctionReward`.
    """
    if not (functions := [FunctionReward(name) for name in weights if "." in name]):
        return
    field.compares = True
    ids, targets = list[str](), list[Target]()
    for index, record in enumerate(islice(split.records(), TRIED)):
        found = [target for target in list_targets(field.encode(record, (0, 0, index)).references) if target.references]
        ids += [record.id] * len(found)
        targets += found
    for function in functions if targets else ():
        function(SampledTexts(ids, targets, [target.references[:1] for target in targets]))
