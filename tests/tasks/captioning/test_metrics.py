"""Caption metrics by language, and the diagnosed faults of a captioner, from captions made by hand."""

from statistics import fmean

import pytest

from vlm.data.records import ListSplit, Record
from vlm.evaluation.metrics.captions import CaptionMetric
from vlm.tasks.captioning.metrics import CaptionFaults, LanguageMetrics, compute_test_scores

IDS = ["a", "b", "c"]
CAPTIONS = {"en": ["a red dog", "two cats", "a bird"], "zh": ["一只红狗", "两只猫", "鸟"]}
REFERENCES = {"en": [["a red dog runs"], ["two cats sit"], ["a man"]], "zh": [["一只红色的狗"], ["两只猫坐着"], []]}


def make_metrics(languages):
    metrics = LanguageMetrics(languages)
    metrics.reset()
    for language, metric in metrics.items():
        metric.update(*rows(language or "en"))
    return metrics


def rows(language):
    every = zip(IDS, CAPTIONS[language], REFERENCES[language], [1.0, 2.0, 3.0], strict=True)
    return zip(*(row for row in every if row[2]), strict=True)


def score_language(language):
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
    metrics = make_metrics(["en", "zh"])
    results = metrics.compute() | (metrics.compute_test_scores(train(), seed=3) if final else {})
    by_language = {}
    for language in ("en", "zh"):
        metric = score_language(language)
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
    metrics = make_metrics(["en", "zh"])
    metrics.compute()
    assert {language: sorted(rows) for language, rows in metrics.per_image().items()} == {"en": IDS, "zh": IDS[:2]}
    first, *others = metrics.predictions()
    assert first == {"image_id": "a", "caption": "a red dog", "language": "en"} and len(others) == 4


def test_without_languages_all_is_as_one_metric_has_it():
    metrics, metric = make_metrics([]), score_language("en")
    assert metrics.compute() == metric.compute() and metrics.note == ""
    assert metrics.compute_test_scores(train("en"), seed=3) == compute_test_scores(metric, train("en"), seed=3)
    assert metrics.per_image() == {"images": metric.per_image()} and metrics.first.predictions == metric.predictions
    assert metrics.predictions()[0] == {"image_id": "a", "caption": "a red dog"}


NAMES = [f"{number:02}.jpg" for number in range(40)]
TRUE = [f"a {color} {shape} on {ground}" for color in ("red", "blue", "old", "big") for shape in ("car", "dog")
        for ground in ("sand", "grass", "ice", "mud", "tar")]  # fmt: skip


def score_captions(captions, references=TRUE, unfinished=(), shuffled=None):
    metrics = LanguageMetrics([])
    metrics.reset()
    rows = [captions, [[text] for text in references], [1.0] * 40, [name in unfinished for name in NAMES]]
    metrics.first.update(NAMES, *rows)
    results = metrics.compute() | ({} if shuffled is None else metrics.first.intervals(seed=0) | shuffled)
    return [one.fault for one in metrics.findings(results, max_tokens=9, beam=1)]


SAME = "the captions do not depend on the images"
REPEATING = ["a a a dog", "a dog on a dog on a dog on", "the man and the man and the man and"]
VERY = [f"very very very {text}" for text in TRUE]


@pytest.mark.parametrize(
    ("captions", "more", "fault"),
    [
        (["a dog"] * 25 + TRUE[25:], {}, f"{SAME}: 25 of 40 are the same, 'a dog'"),
        ([*TRUE[7:], *TRUE[:7]], {"shuffled": {"cider@shuffled": 9.0}}, "9.000 when each is given to another image"),
        (TRUE, {"unfinished": NAMES[:5]}, "the captions do not end: 5 of 40 end at the limit of 9 tokens"),
        *(([f"{text} {name[:2]}" for name in NAMES[:5]] + TRUE[5:], {}, "5 of 40 captions r") for text in REPEATING),
    ],
)
def test_a_fault_is_named(captions, more, fault):
    (said,) = score_captions(captions, **more)
    assert fault in said and (SAME in said) == ("shuffled" in more or "same" in fault)


@pytest.mark.parametrize(
    ("captions", "more"),
    [
        (TRUE, {"shuffled": {"cider@shuffled": 0.5}}),
        (["a dog"] * 40, {"references": ["a dog"] * 30 + TRUE[30:]}),  # which is true of most images
        (TRUE, {"unfinished": NAMES[:4]}),
        (VERY, {"references": VERY}),  # the data repeat words too
        ([f"a dog and a dog {name}" for name in NAMES], {}),
    ],
)
def test_what_is_no_fault_is_not_named(captions, more):
    assert score_captions(captions, **more) == []


def test_each_language_is_looked_at():
    metrics = LanguageMetrics(["en", "zh"])
    metrics.reset()
    for (_, metric), captions in zip(metrics.items(), (TRUE, ["狗"] * 40), strict=True):
        metric.update(NAMES, captions, [[text] for text in TRUE])
    (finding,) = metrics.findings(metrics.compute(), max_tokens=9, beam=1)
    assert finding.fault.startswith("zh: the captions do not depend on the images: 40 of 40")
    assert finding.lines()[1].startswith("  1. train longer")


@pytest.mark.parametrize(("beam", "advised"), [(1, True), (4, False)])
def test_a_beam_search_is_not_advised_to_who_uses_one(beam, advised):
    metrics = LanguageMetrics([])
    metrics.reset()
    metrics.first.update(NAMES, ["a dog a dog a dog a dog"] * len(NAMES), [[text] for text in TRUE])
    found = metrics.findings(metrics.compute(), max_tokens=9, beam=beam)
    (repeating,) = [one for one in found if "repeat words" in one.fault]
    assert any("task.beam=4" in remedy for remedy in repeating.remedies) == advised


def test_faults_are_repeated_pairs_and_ends_within_a_phrase() -> None:
    faults = CaptionFaults(["a dog on the grass", "the dog", "a cat of a man", *["the end"] * 2])
    assert faults.shares(["a dog on a", "a dog a dog", "the dog", "the the the"]) == {
        "repeated": 0.5,  # "a dog" and "the the"
        "bad_endings": 0.5,  # "a" and "the" end no caption
    }
    assert faults.shares([""]) == {"repeated": 0.0, "bad_endings": 1.0}
