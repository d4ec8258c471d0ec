"""Caption metrics in several languages, with controls, diagnosed faults and their section of a report."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from torch import nn

from vlm.data.records import InLanguage, Split
from vlm.evaluation.metrics.captions import CaptionMetric, exact_matches, shuffle_captions
from vlm.evaluation.metrics.coco import best_constant, score_captions
from vlm.evaluation.metrics.texts import caption_rates
from vlm.evaluation.metrics.tokens import Units
from vlm.evaluation.report.sections import SHOWN, Card, Cards, Finding, Section, random_places
from vlm.randomness import numpy_rng

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
    prepared, predictions, references = metric.prepared(), metric.predictions, metric.references
    order = numpy_rng(seed, "constant captions").permutation(len(train))[:CANDIDATES]
    candidates = sorted({caption for index in order for caption in train.record(int(index))["captions"][:1]})
    constant, _ = best_constant(prepared, candidates)
    controls = metric.controls = {
        "constant": dict.fromkeys(references, constant),
        "shuffled": shuffle_captions(predictions, seed) if len(predictions) > 1 else dict(predictions),
    }
    scores: dict[str, float] = {}
    for control, captions in controls.items():
        summary = score_captions(captions, prepared).summary()
        exact = exact_matches(captions, references)
        summary = {**summary, "exact_match": sum(exact) / max(1, len(captions)), **caption_rates(captions, references)}
        scores |= {f"{name}@{control}": value for name, value in summary.items()}
    return scores


def beside_scores(metric: CaptionMetric, train: Split, *, seed: int) -> dict[str, float]:
    """Returns controls, novelty and intervals, which a test adds to its scores; arguments as in `caption_controls`."""
    results = caption_controls(metric, train, seed=seed)
    results["novelty"] = novelty(metric.predictions.values(), train, metric.units)
    return results | metric.intervals(seed=seed)


def novelty(predictions: Iterable[str], train: Split, units: Units) -> float:
    """Returns the share of captions that the training split's first epoch lacks, compared in the metrics' units."""
    written = {tuple(units.cut(caption)) for record in train.records() for caption in record["captions"]}
    captions = [tuple(units.cut(text)) for text in predictions]
    return sum(caption not in written for caption in captions) / len(captions)


FEWEST = 4  # fewest captions from which a fault is concluded
COMPARED = 30  # fewest captions for which an interval is meaningful
LONGEST = 4  # longest run of words that is searched for
TIMES = 3  # consecutive repetitions of a run of words that are a fault

ENCODER = "more images, or a pretrained encoder (model=pretrained): a few hundred images teach none from scratch"
IMAGES = (
    "train longer (trainer.max_epochs): the first captions of any captioner are all alike",
    "lower optim.lr: a third, or a tenth where the weights are pretrained",
    "vlm check-data: do the captions of the data differ, and are these the right images?",
    ENCODER,
)
ENDING = (
    "train longer (trainer.max_epochs): when to end is learned late",
    "task.max_tokens: raise it where the captions of the data are as long",
    "data.max_len: raise it where vlm check-data tells of over-long captions, whose end is cut",
)
REPEATING = (
    "train longer (trainer.max_epochs), or lower optim.lr to a third",
    "--no-repeat-ngram 3, where captions are written",
)
BEAM = "task.beam=4: a beam search repeats less than greedy decoding"


def image_findings(metric: CaptionMetric, scores: Mapping[str, float]) -> list[Finding]:
    """Returns a finding if the captions of the last `compute` ignore the images.

    Args:
        metric: The metric with captions and references.
        scores: cider@low and cider@shuffled, if they were measured.
    """
    if len(metric.predictions) < FEWEST:
        return []
    return [Finding(fault, IMAGES) for fault in _same(metric) or _no_better(metric, scores)]


def text_findings(metric: CaptionMetric, *, max_tokens: int, beam: int) -> list[Finding]:
    """Returns findings if the captions of the last `compute` do not end, or repeat words.

    Args:
        metric: The metric with captions and references.
        max_tokens: Longest text, in tokens.
        beam: Hypotheses of each search with which the model's captions are written.
    """
    count, unfinished = len(metric.predictions), len(metric.unfinished)
    found = []
    if count >= FEWEST and unfinished > 0.1 * count:
        fault = f"the captions do not end: {unfinished:,} of {count:,} end at the limit of {max_tokens} tokens"
        found.append(Finding(fault, ENDING))
    if count >= FEWEST and (fault := _repeating(metric)):
        found.append(Finding(fault, (*REPEATING, *([BEAM] if beam == 1 else []))))
    return found


def _same(metric: CaptionMetric) -> list[str]:
    """Returns a fault if most images have the same caption, which few of them have as a reference."""
    count = len(metric.predictions)
    (caption, often), *_ = Counter(" ".join(text.split()) for text in metric.predictions.values()).most_common(1)
    true = sum(caption in (" ".join(text.split()) for text in texts) for texts in metric.references.values())
    if often <= count / 2 or true > often / 2:
        return []
    return [f"the captions do not depend on the images: {often:,} of {count:,} are the same, {caption!r}"]


def _no_better(metric: CaptionMetric, scores: Mapping[str, float]) -> list[str]:
    """Returns a fault if captions fit their own images no better than other images."""
    if len(metric.predictions) < COMPARED or not scores or scores["cider@low"] > scores["cider@shuffled"]:
        return []
    assert metric.scores is not None, "nothing was computed yet"
    given = f"their CIDEr is {metric.scores.summary()['cider']:.3f}, and {scores['cider@shuffled']:.3f}"
    return [f"the captions do not depend on the images: {given} when each is given to another image"]


def _repeating(metric: CaptionMetric) -> str:
    cut = metric.units.cut
    own = [_repeats(cut(text)) for text in metric.predictions.values()]
    theirs = [_repeats(cut(text)) for texts in metric.references.values() for text in texts]
    if sum(own) / len(own) <= 0.1 + sum(theirs) / max(1, len(theirs)):
        return ""
    return f"{sum(own):,} of {len(own):,} captions repeat words {TIMES} times or more in a row"


def _repeats(words: Sequence[str]) -> bool:
    """Returns True if a run of words repeats several times in a row."""
    return any(any(_runs(words, length)) for length in range(1, LONGEST + 1))


def _runs(words: Sequence[str], length: int) -> Iterator[bool]:
    span = TIMES * length
    for start in range(len(words) - span + 1):
        run = words[start : start + length]
        yield all(words[at : at + length] == run for at in range(start + length, start + span, length))


INTERVAL = ("@low", "@high")  # suffixes of intervals; their means over languages are not an interval of the mean


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
        return [{"image_id": id, "caption": text} | ({"language": own} if own else {}) for id, text, own in rows]

    def per_image(self) -> dict[str, Any]:
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
        return self._joined(lambda language, metric: metric.compute())

    def beside_scores(self, train: Split, *, seed: int) -> dict[str, float]:
        """Returns controls, novelty and intervals as in `controls.beside_scores`, per language."""

        def results(language: str | None, metric: CaptionMetric) -> dict[str, float]:
            return beside_scores(metric, train if language is None else InLanguage(train, language), seed=seed)

        return self._joined(results)

    def findings(self, results: Mapping[str, float], *, max_tokens: int, beam: int) -> list[Finding]:
        """Returns the faults of the captions of each language.

        Args:
            results: Results of the last evaluation.
            max_tokens: Longest text, in tokens.
            beam: Hypotheses of each search with which the captions were written.
        """
        found = []
        for language, metric in self.items():
            names = {name: _named(name, language) if language else name for name in ("cider@low", "cider@shuffled")}
            own = {name: results[stored] for name, stored in names.items() if stored in results}
            several = image_findings(metric, own) + text_findings(metric, max_tokens=max_tokens, beam=beam)
            found += [one._replace(fault=f"{language}: {one.fault}") if language else one for one in several]
        return found

    def _joined(self, measure: Callable[[str | None, CaptionMetric], Mapping[str, float]]) -> dict[str, float]:
        results = {language: measure(language, metric) for language, metric in self.items()}
        if (plain := results.get(None)) is not None:
            return dict(plain)
        names = [name for name in results[self.languages[0]] if not name.endswith(INTERVAL)]
        means = {name: fmean(scores[name] for scores in results.values()) for name in names}
        return means | {
            _named(name, str(language)): value for language, scores in results.items() for name, value in scores.items()
        }


def _named(name: str, language: str) -> str:
    """The name of a language's result: cider_de, cider_de@low."""
    metric, at, kind = name.partition("@")
    return f"{metric}_{language}{at}{kind}"


def caption_sections(images: Mapping[str, Mapping[str, Any]], language: str | None = None) -> list[Section]:
    """Returns sections with random captions, and the best and worst by CIDEr and ROUGE-L.

    Args:
        images: Caption, references and scores of each image, by its name.
        language: Language of the captions, for the titles; None if there is only one.
    """
    ranked = sorted(images, key=lambda name: (-images[name]["cider"], -images[name]["rouge_l"], name))
    count = min(SHOWN, -(-len(ranked) // 2))
    kinds = {"Random captions": [ranked[at] for at in random_places(len(ranked))]}
    kinds |= {"Best captions": ranked[:count], "Worst captions": ranked[::-1][:count]}
    kinds = kinds if language is None else {f"{title} ({language})": names for title, names in kinds.items()}
    return [Section(title, [Cards([_card(name, images[name]) for name in names])]) for title, names in kinds.items()]


def _card(name: str, row: Mapping[str, Any]) -> Card:
    scores = f"CIDEr {row['cider']:.2f}, ROUGE-L {row['rouge_l']:.2f}"
    scores += f", loss {row['loss']:.2f}" if "loss" in row else ""
    return Card(image=name, text=row["caption"], lines=[scores, name], references=row["references"])
