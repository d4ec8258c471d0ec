"""Caption metrics in several languages, with controls, diagnosed faults and their section of a report."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from statistics import fmean

from torch import nn

from vlm.data.records import LanguageSplit, Split
from vlm.evaluation.metrics.captions import CaptionMetric, ScoredCaption, exact_matches, shuffle_captions
from vlm.evaluation.metrics.coco import score_captions
from vlm.evaluation.metrics.texts import caption_rates
from vlm.evaluation.metrics.tokens import Units, units_of
from vlm.evaluation.report.content import Finding
from vlm.randomness import numpy_rng

RARELY = 0.01  # a word ends a caption badly if a smaller share of the captions with it end in it
CANDIDATES = 1000  # training captions tried as the best constant one


def caption_controls(metric: CaptionMetric, train: Split, *, seed: int) -> dict[str, float]:
    """Returns the scores of two controls: one caption for all images, and the model's captions given to other images.

    Args:
        metric: The metric that scored the model's captions.
        train: The training split.
        seed: Seed of random choices.
    Returns:
        metric@constant, of the one training caption that scores best on all images; metric@shuffled.
    """
    reference_set, predictions, references = metric.get_references(), metric.predictions, metric.references
    order = numpy_rng(seed, "constant captions").permutation(len(train))[:CANDIDATES]
    candidates = sorted({caption for index in order for caption in train.record(int(index))["captions"][:1]})
    controls = metric.controls = {
        "constant": dict.fromkeys(references, reference_set.best_constant(candidates)),
        "shuffled": shuffle_captions(predictions, seed),
    }
    scores: dict[str, float] = {}
    for control, captions in controls.items():
        summary = score_captions(captions, reference_set).summary()
        exact = exact_matches(captions, references)
        summary = {**summary, "exact_match": sum(exact) / max(1, len(captions)), **caption_rates(captions, references)}
        scores |= {f"{name}@{control}": value for name, value in summary.items()}
    return scores


def compute_test_scores(metric: CaptionMetric, train: Split, *, seed: int) -> dict[str, float]:
    """Returns controls, novelty and intervals, which a test adds to its scores; arguments as in `caption_controls`."""
    novelty = compute_novelty(metric.predictions.values(), train, metric.units)
    return {**caption_controls(metric, train, seed=seed), "novelty": novelty, **metric.intervals(seed=seed)}


def compute_novelty(predictions: Iterable[str], train: Split, units: Units) -> float:
    """Returns the share of captions that the training split's first epoch lacks, compared in the metrics' units."""
    training_captions = {tuple(units.cut(caption)) for record in train.records() for caption in record["captions"]}
    captions = [tuple(units.cut(text)) for text in predictions]
    return sum(caption not in training_captions for caption in captions) / len(captions)


MIN_CAPTIONS = 4  # fewest captions from which a fault is concluded
MIN_CAPTIONS_FOR_INTERVAL = 30
MAX_PHRASE_WORDS = 4  # longest run of words that is searched for
MIN_REPETITIONS = 3  # consecutive repetitions of a run of words that are a fault

ENCODER = "more images, or a pretrained encoder (model=pretrained): a few hundred images teach none from scratch"
IMAGES = (
    "train longer (trainer.max_epochs): early in training, all captions are alike",
    "lower optim.lr: to a third, or to a tenth if the weights are pretrained",
    "vlm check-data: do the captions of the data differ, and are these the right images?",
    ENCODER,
)
ENDING = (
    "train longer (trainer.max_epochs): models learn late when to end",
    "task.max_tokens: raise it if the captions of the data are as long",
    "data.max_len: raise it if vlm check-data reports over-long captions, which are truncated",
)
REPEATING = (
    "train longer (trainer.max_epochs), or lower optim.lr to a third",
    "use --no-repeat-ngram 3 with vlm caption",
)
BEAM = "task.beam=4: a beam search repeats less than greedy decoding"


def image_findings(metric: CaptionMetric, scores: Mapping[str, float]) -> list[Finding]:
    """Returns a finding if the captions of the last `compute` ignore the images.

    Args:
        metric: The metric with captions and references.
        scores: cider@low and cider@shuffled, if they were measured.
    """
    count = len(metric.predictions)
    if count < MIN_CAPTIONS:
        return []
    (caption, often), *_ = Counter(" ".join(text.split()) for text in metric.predictions.values()).most_common(1)
    true = sum(caption in (" ".join(text.split()) for text in texts) for texts in metric.references.values())
    if often > count / 2 and true <= often / 2:
        fault = f"{often:,} of {count:,} are the same, {caption!r}"
    elif count >= MIN_CAPTIONS_FOR_INTERVAL and scores and scores["cider@low"] <= scores["cider@shuffled"]:
        assert metric.scores is not None, "nothing was computed yet"
        comparison = f"{metric.scores.summary()['cider']:.3f}, and {scores['cider@shuffled']:.3f}"
        fault = f"their CIDEr is {comparison} when each is given to another image"
    else:
        return []
    return [Finding(f"the captions do not depend on the images: {fault}", IMAGES)]


def text_findings(metric: CaptionMetric, *, max_tokens: int, beam: int) -> list[Finding]:
    """Returns findings if the captions of the last `compute` do not end, or repeat words.

    Args:
        metric: The metric with captions and references.
        max_tokens: Longest text, in tokens.
        beam: Hypotheses of each search with which the model's captions are written.
    """
    count, unfinished = len(metric.predictions), len(metric.unfinished)
    findings = []
    if count >= MIN_CAPTIONS and unfinished > 0.1 * count:
        fault = f"the captions do not end: {unfinished:,} of {count:,} end at the limit of {max_tokens} tokens"
        findings.append(Finding(fault, ENDING))
    if count < MIN_CAPTIONS:
        return findings
    cut = metric.units.cut
    predicted = [_has_repetition(cut(text)) for text in metric.predictions.values()]
    true = [_has_repetition(cut(text)) for texts in metric.references.values() for text in texts]
    if sum(predicted) / count > 0.1 + sum(true) / max(1, len(true)):
        fault = f"{sum(predicted):,} of {count:,} captions repeat words {MIN_REPETITIONS} times or more in a row"
        findings.append(Finding(fault, (*REPEATING, *([BEAM] if beam == 1 else []))))
    return findings


def _has_repetition(words: Sequence[str]) -> bool:
    """Returns True if a run of words repeats several times in a row."""
    for length in range(1, MAX_PHRASE_WORDS + 1):
        span = MIN_REPETITIONS * length
        for start in range(len(words) - span + 1):
            run = words[start : start + length]
            if all(words[at : at + length] == run for at in range(start + length, start + span, length)):
                return True
    return False


INTERVAL = ("@low", "@high")  # suffixes of intervals; their means over languages are not an interval of the mean


class CaptionFaults:
    """Faults of captions that n-gram metrics reward: repeated words, and ends in the middle of a phrase.

    A caption repeats itself if a pair of adjacent words occurs twice. Its end is bad if its last word ends fewer than
    one in a hundred of the training captions that contain it ("a", "of", "with").

    Args:
        corpus: The training captions.
    """

    def __init__(self, corpus: Iterable[str]) -> None:
        captions = list(corpus)
        self.units, self._used, self._ends = units_of(captions), Counter[str](), Counter[str]()
        for tokens in filter(None, map(self.units.cut, captions)):
            self._used.update(set(tokens))
            self._ends[tokens[-1]] += 1

    def shares(self, captions: Iterable[str]) -> dict[str, float]:
        """Returns the share of captions with each fault."""
        texts = [self.units.cut(caption) for caption in captions]
        repeated = sum(max(Counter(pairwise(tokens)).values(), default=0) > 1 for tokens in texts)
        ends = sum(not tokens or self._ends[tokens[-1]] < RARELY * self._used[tokens[-1]] for tokens in texts)
        return {"repeated": repeated / max(1, len(texts)), "bad_endings": ends / max(1, len(texts))}

    def compare(self, captions: CaptionMetric) -> dict[str, float]:
        """Returns the shares of an evaluation's captions, and of its references, with each fault."""
        shares = self.shares(chain.from_iterable(captions.references.values()))
        reference_shares = {f"{name}@references": share for name, share in shares.items()}
        return self.shares(captions.predictions.values()) | reference_shares


class LanguageMetrics(nn.Module):
    """The caption metrics of each language as name_language, and their means over languages under the plain names.

    Without languages there is one metric, of the language None, whose results have the plain names.

    Args:
        languages: The languages, in the order of the results.
    """

    def __init__(self, languages: Sequence[str]) -> None:
        super().__init__()
        self.languages: list[str | None] = [*languages] or [None]
        self.metrics = nn.ModuleList(CaptionMetric() for _ in self.languages)

    def items(self) -> Iterator[tuple[str | None, CaptionMetric]]:
        """Each language with its metric."""
        return zip(self.languages, self.metrics, strict=True)  # type: ignore[arg-type]

    @property
    def first(self) -> CaptionMetric:
        """The metric of the first language, for uses that need only one."""
        return self.metrics[0]  # type: ignore[return-value]

    @property
    def note(self) -> str:
        """A note by language on units other than words."""
        notes = {language: metric.units.note for language, metric in self.items()}
        return "; ".join(": ".join(filter(None, pair)) for pair in notes.items() if pair[1])

    def predictions(self) -> list[dict[str, str]]:
        """Returns the captions in COCO's result format, with the language of each if there are languages."""
        captions = ((language, metric.predictions) for language, metric in self.items())
        rows = [(id, text, language) for language, texts in captions for id, text in texts.items()]
        return [{"image_id": id, "caption": text} | ({"language": tag} if tag else {}) for id, text, tag in rows]

    def per_image(self) -> dict[str, dict[str, ScoredCaption]]:
        """Returns the rows of each image by language, under "images" if there are no languages."""
        return {language or "images": metric.per_image() for language, metric in self.items()}

    def reset(self) -> None:
        for _, metric in self.items():
            metric.reset()

    def compute(self) -> dict[str, float]:
        """The scores.

        Raises:
            UserError: A language has no caption.
        """
        return self._join_languages(lambda language, metric: metric.compute())

    def compute_test_scores(self, train: Split, *, seed: int) -> dict[str, float]:
        """Returns controls, novelty and intervals as in the function of this name, per language."""

        def results(language: str | None, metric: CaptionMetric) -> dict[str, float]:
            return compute_test_scores(metric, train if language is None else LanguageSplit(train, language), seed=seed)

        return self._join_languages(results)

    def findings(self, results: Mapping[str, float], *, max_tokens: int, beam: int) -> list[Finding]:
        """Returns the faults of the captions of each language.

        Args:
            results: Results of the last evaluation.
            max_tokens: Longest text, in tokens.
            beam: Hypotheses of each search with which the captions were written.
        """
        findings = []
        for language, metric in self.items():
            scores = {}
            for name in ("cider@low", "cider@shuffled"):
                if (stored := _name_result(name, language) if language else name) in results:
                    scores[name] = results[stored]
            faults = image_findings(metric, scores) + text_findings(metric, max_tokens=max_tokens, beam=beam)
            prefix = f"{language}: " if language else ""
            findings += [Finding(prefix + fault, remedies) for fault, remedies in faults]
        return findings

    def _join_languages(self, measure: Callable[[str | None, CaptionMetric], Mapping[str, float]]) -> dict[str, float]:
        results = {language: measure(language, metric) for language, metric in self.items()}
        if (plain := results.get(None)) is not None:
            return dict(plain)
        names = [name for name in results[self.languages[0]] if not name.endswith(INTERVAL)]
        joined = {name: fmean(scores[name] for scores in results.values()) for name in names}
        for language, scores in results.items():
            joined |= {_name_result(name, str(language)): value for name, value in scores.items()}
        return joined


def _name_result(name: str, language: str) -> str:
    """The name of a language's result: cider_de, cider_de@low."""
    metric, at, kind = name.partition("@")
    return f"{metric}_{language}{at}{kind}"
