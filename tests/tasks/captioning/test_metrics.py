"""Caption metrics by language: each as CaptionMetric has it of these captions alone."""

from statistics import fmean

import pytest

from vlm.data.records import ListSplit, Record
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.tasks.captioning.metrics import LanguageMetrics, compute_test_scores

IDS = ["a", "b", "c"]
CAPTIONS = {"en": ["a red dog", "two cats", "a bird"], "zh": ["一只红狗", "两只猫", "鸟"]}
REFERENCES = {"en": [["a red dog runs"], ["two cats sit"], ["a man"]], "zh": [["一只红色的狗"], ["两只猫坐着"], []]}


def filled(languages):
    metrics = LanguageMetrics(languages)
    metrics.reset()
    for language, metric in metrics.items():
        metric.update(*rows(language or "en"))
    return metrics


def rows(language):
    every = zip(IDS, CAPTIONS[language], REFERENCES[language], [1.0, 2.0, 3.0], strict=True)
    return zip(*(row for row in every if row[2]), strict=True)


def alone(language):
    metric = CaptionMetric()
    metric.update(*rows(language))
    return metric


def train(language=None):
    texts = [("a dog", "en"), ("狗", "zh"), ("two cats", "en")]
    own = [text for text, stated in texts if language in (None, stated)]
    known = {"captions": own, "references": own, "languages": [stated for _, stated in texts]}
    return ListSplit([known], lambda known, epoch: Record("t", known))


@pytest.mark.parametrize("final", [False, True])
def test_each_language_is_scored_by_itself_and_their_mean_has_the_plain_name(final):
    metrics = filled(["en", "zh"])
    results = metrics.compute() | (metrics.compute_test_scores(train(), seed=3) if final else {})
    by_language = {}
    for language in ("en", "zh"):
        metric = alone(language)
        by_language[language] = metric.compute() | (
            compute_test_scores(metric, train(language), seed=3) if final else {}
        )
    expected = {}
    for language, scores in by_language.items():
        for name, value in scores.items():
            metric_name, *kind = name.split("@")
            expected["@".join([f"{metric_name}_{language}", *kind])] = value
    shared = [name for name in by_language["en"] if not name.endswith(("@low", "@high"))]
    expected |= {name: fmean([by_language["en"][name], by_language["zh"][name]]) for name in shared}
    assert results == expected
    assert metrics.note == "zh: scored by characters: the script of the references has no spaces between words"


def test_captions_and_details_are_by_language():
    metrics = filled(["en", "zh"])
    metrics.compute()
    assert {language: sorted(rows) for language, rows in metrics.per_image().items()} == {"en": IDS, "zh": IDS[:2]}
    first, *others = metrics.predictions()
    assert first == {"image_id": "a", "caption": "a red dog", "language": "en"} and len(others) == 4


def test_without_languages_all_is_as_one_metric_has_it():
    metrics, metric = filled([]), alone("en")
    assert metrics.compute() == metric.compute() and metrics.note == ""
    assert metrics.compute_test_scores(train("en"), seed=3) == compute_test_scores(metric, train("en"), seed=3)
    assert metrics.per_image() == {"images": metric.per_image()} and metrics.first.predictions == metric.predictions
    assert metrics.predictions()[0] == {"image_id": "a", "caption": "a red dog"}
