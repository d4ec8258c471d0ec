"""Controls of text tasks: scores of models that count words and ignore their order."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence

from vlm.tasks.tagging.metrics import TaggingMetric

Words = Sequence[str]
_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


class NaiveBayes:
    """Multinomial naive Bayes on bags of words, with add-one smoothing (McCallum and Nigam 1998).

    Args:
        samples: The words of each training sample, and its class.
        num_classes: Number of classes.
    """

    def __init__(self, samples: Iterable[tuple[Words, int]], num_classes: int) -> None:
        self.counts: list[Counter[str]] = [Counter() for _ in range(num_classes)]
        sizes = [0] * num_classes
        for words, label in samples:
            sizes[label] += 1
            self.counts[label].update(words)
        vocabulary_size = len(set().union(*self.counts)) + 1  # plus one for unseen words
        self.totals = [sum(counts.values()) + vocabulary_size for counts in self.counts]
        self.priors = [math.log(max(size, 1e-9) / max(1, sum(sizes))) for size in sizes]

    def predict(self, words: Words) -> int:
        """The likeliest class."""
        scores = [
            prior + sum(math.log((counts[word] + 1) / total) for word in words)
            for prior, counts, total in zip(self.priors, self.counts, self.totals, strict=True)
        ]
        return scores.index(max(scores))


def bag_of(texts: Sequence[str]) -> list[str]:
    """Returns the words of one or two texts, each marked with the number of its text."""
    return [f"{place} {word}" for place, text in enumerate(texts) for word in text.lower().split()]


class MostFrequent:
    """The most frequent value of each key in training, for controls that know only a key.

    Args:
        samples: Keys of each sample, from the most specific to the most general, and its value.
        of_equals: Choice among equally frequent values: min for the first by name, max for the last.
    """

    def __init__(
        self, samples: Iterable[tuple[Sequence[Hashable], str]], *, of_equals: Callable[[Iterable[str]], str] = min
    ) -> None:
        counts: defaultdict[Hashable, Counter[str]] = defaultdict(Counter)
        for keys, value in samples:
            for key in dict.fromkeys(keys):
                counts[key][value] += 1
        highest = {key: max(value_counts.values()) for key, value_counts in counts.items()}
        self._values = {
            key: of_equals(value for value, count in value_counts.items() if count == highest[key])
            for key, value_counts in counts.items()
        }

    def value(self, keys: Iterable[Hashable]) -> str:
        """Returns the value of the first key that training has; "" if it has none."""
        return next((self._values[key] for key in keys if key in self._values), "")


def beginnings(question: str) -> list[str]:
    """Returns a question, its first two words, its first word, and ""."""
    words = question.lower().split()
    return [" ".join(words), " ".join(words[:2]), " ".join(words[:1]), ""]


def tag_controls(metric: TaggingMetric, train: Iterable[tuple[Words, Words]]) -> dict[str, float]:
    """Returns metric@frequent, of each word's most frequent tag in train, and metric@constant, of the overall one."""
    pairs = (pair for sentence in train for pair in zip(*sentence, strict=True))
    frequent = MostFrequent(((word, None), tag) for word, tag in pairs)
    sentences = [sample.words for sample in metric.samples.values()]
    metric.controls = {
        "frequent": [[frequent.value((word, None)) for word in words] for words in sentences],
        "constant": [[frequent.value([None])] * len(words) for words in sentences],
    }
    scores = {control: metric.score(tags) for control, tags in metric.controls.items()}
    return {f"{name}@{control}": value for control, values in scores.items() for name, value in values.items()}


def overlapping_span(question: str, context: str) -> str:
    """Returns the longest run of words not in a question, from the context's sentence that shares most with it."""
    question_words = set(_WORD.findall(question.lower()))
    sentences = [part for part in _SENTENCE_END.split(context) if part.strip()]
    if not sentences:
        return ""
    sentence = max(sentences, key=lambda part: len(question_words & set(_WORD.findall(part.lower()))))
    runs: list[tuple[int, int]] = [(0, 0)]
    for match in _WORD.finditer(sentence):
        if match.group().lower() in question_words:
            runs.append((match.end(), match.end()))
        else:
            start, stop = runs[-1]
            runs[-1] = (match.start() if start == stop else start, match.end())
    start, stop = max(runs, key=lambda run: len(_WORD.findall(sentence[slice(*run)])))
    return sentence[start:stop]
