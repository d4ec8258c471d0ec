"""Scores of tagged words against a definition of spans that looks at every pair of ends."""

import random
from itertools import combinations

import pytest
from seqeval.metrics import f1_score, precision_score, recall_score
from seqeval.scheme import BILOU, IOBES, Entities

from vlm.errors import UserError
from vlm.tasks.shared.text_tasks import NaiveBayes, bag_of, tag_controls
from vlm.tasks.tagging.metrics import SCHEMES, Sentence, TaggingMetric, find_scheme, find_spans, scheme_note

TAGS = ["O", "B-x", "I-x", "B-y", "I-y"]


def begins(tags, at):
    """True where seqeval has a span begin: at B, and at I that nothing of its kind precedes."""
    mark, _, kind = tags[at].partition("-")
    before = tags[at - 1] if at else "O"
    return mark == "B" or (mark == "I" and before.partition("-")[2] != kind)


def every_span(tags):
    """All runs of words that begin a span, hold no other begin, and end before one, before O or at the end."""
    found = set()
    for start, stop in combinations(range(len(tags) + 1), 2):
        kind = tags[start].partition("-")[2]
        inner = range(start + 1, stop)
        whole = tags[start] != "O" and begins(tags, start)
        whole = whole and all(tags[at] == f"I-{kind}" and not begins(tags, at) for at in inner)
        if whole and (stop == len(tags) or tags[stop] == "O" or begins(tags, stop)):
            found.add((kind, start, stop))
    return found


def draw_tags(rng, count, longest=7):
    return [[rng.choice(TAGS) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def test_spans_are_those_of_the_definition():
    for tags in draw_tags(random.Random(0), 3000):
        assert {tuple(span) for span in find_spans(tags)} == every_span(tags), tags


def test_examples_of_seqeval():
    """Those of its README: one of two predicted spans is exact, and an I without its B begins one."""
    assert list(find_spans(["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"])) == [("MISC", 3, 6)]
    assert list(find_spans(["O", "O", "I-MISC", "I-PER", "B-PER"])) == [("MISC", 2, 3), ("PER", 3, 4), ("PER", 4, 5)]
    assert not list(find_spans(["O"])) and not list(find_spans([]))


def metric_of(rows, classes=TAGS):
    metric = TaggingMetric(classes=classes)
    metric.update(list(map(str, range(len(rows)))), [Sentence(["w"] * len(true), true, taken) for true, taken in rows])
    return metric


def test_scores_are_those_of_brute_force():
    rng = random.Random(1)
    true = draw_tags(rng, 60)
    rows = [(tags, [rng.choice([tag, tag, tag, rng.choice(TAGS)]) for tag in tags]) for tags in true]
    metric = metric_of(rows)
    scores = metric.compute()
    words = [(a, b) for tags, taken in rows for a, b in zip(tags, taken, strict=True)]
    assert scores["word_accuracy"] == pytest.approx(sum(a == b for a, b in words) / len(words))
    own = {(n, *span) for n, (tags, _) in enumerate(rows) for span in every_span(tags)}
    found = {(n, *span) for n, (_, tags) in enumerate(rows) for span in every_span(tags)}
    precision, recall = len(own & found) / len(found), len(own & found) / len(own)
    assert scores["span_precision"] == pytest.approx(precision) and scores["span_recall"] == pytest.approx(recall)
    assert scores["span_f1"] == pytest.approx(2 * precision * recall / (precision + recall))
    ends = metric.intervals(seed=0)
    assert ends["word_accuracy@low"] < scores["word_accuracy"] < ends["word_accuracy@high"]
    assert ends["span_f1@low"] < scores["span_f1"] < ends["span_f1@high"]
    figures = metric.per_class()
    of_x = [{span for span in each if span[1] == "x"} for each in (own, found)]
    assert figures["x"]["count"] == len(of_x[0])
    true_b, right_b = sum(tag == "B-x" for tag, _ in words), words.count(("B-x", "B-x"))
    assert figures["B-x"]["recall"] == right_b / true_b
    assert figures["B-x"]["precision"] == right_b / sum(taken == "B-x" for _, taken in words)
    assert figures["x"]["f1"] == pytest.approx(2 * len(of_x[0] & of_x[1]) / (len(of_x[0]) + len(of_x[1])))
    matrix, names = metric.confusion()
    assert matrix[names.index("B-x")][names.index("O")] == sum(pair == ("B-x", "O") for pair in words)


def test_tags_without_marks_have_no_spans():
    assert find_scheme(TAGS) and not any(map(find_scheme, (["O"], ["NOUN", "O"], ["B-x", "X"], [])))
    metric = metric_of([(["NOUN", "VERB"], ["NOUN", "NOUN"])], ["NOUN", "VERB"])
    assert metric.compute() == {"word_accuracy": 0.5}
    assert metric.score([["VERB", "VERB"]]) == {"word_accuracy": 0.5}
    none = {"span_precision": 0.0, "span_recall": 0.0, "span_f1": 0.0}
    assert metric_of([(["O", "O"], ["O", "O"])]).compute() == {"word_accuracy": 1.0, **none}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme", "marks"), [("IOBES", IOBES, "BIES"), ("BILOU", BILOU, "BILU")])
def test_closed_schemes_are_scored_as_by_seqeval_in_strict_mode(name, scheme, marks):
    rng = random.Random(name)
    tags = ["O", *(f"{mark}-{kind}" for mark in marks for kind in ("x", "y"))]
    assert find_scheme(tags) is SCHEMES[name]
    for number in range(300):
        true = [[rng.choice(tags) for _ in range(rng.randint(1, 8))] for _ in range(10)]
        taken = [[tag if rng.random() < 0.8 else rng.choice(tags) for tag in row] for row in true]
        metric = metric_of(list(zip(true, taken, strict=True)), tags)
        own = [[(span.kind, span.start, span.stop) for span in find_spans(row, SCHEMES[name])] for row in true]
        assert own == [[one.to_tuple()[1:] for one in row] for row in Entities(true, scheme).entities], number
        scores = metric.compute()
        options = {"mode": "strict", "scheme": scheme, "zero_division": 0}
        for key, function in (("precision", precision_score), ("recall", recall_score), ("f1", f1_score)):
            assert scores[f"span_{key}"] == pytest.approx(function(true, taken, **options)), number


def test_tags_of_other_schemes_get_a_line():
    assert "span scores are left out" in scheme_note(["O", "B-x", "M-x", "E-x"])
    assert "E-, I-" in scheme_note(["O", "I-x", "E-x"]) and "B-, L-, S-" in scheme_note(["B-x", "L-x", "S-x"])
    assert "B-" in scheme_note(["B-x", "X"])
    assert not any(map(scheme_note, (TAGS, ["NOUN", "-LRB-", "O"], ["O"], ["B-x", "S-x"], ["U-x", "L-x", "B-x"])))
    assert metric_of([(["M-x"], ["M-x"])], ["M-x"]).compute() == {"word_accuracy": 1.0}


def test_the_order_of_sentences_changes_nothing_and_one_counts_once():
    rows = list(zip(draw_tags(random.Random(2), 9), draw_tags(random.Random(2), 9), strict=True))
    metric = metric_of(rows)
    again = metric_of(rows)
    again.update(["3"], [Sentence(["w"], ["O"], ["O"])])  # a sentence that a sampler repeats
    assert metric.compute() == again.compute()
    with pytest.raises(UserError, match="no sentence"):
        TaggingMetric(classes=TAGS).compute()


def test_a_bag_of_words_is_counted_by_hand():
    """Two classes, five known words and one for the unknown: P(a|0) = (2+1)/(3+4), P(a|1) = (0+1)/(2+4), ..."""
    bag = NaiveBayes([(["a", "a", "b"], 0), (["b", "c"], 1)], 2)
    assert bag.totals == [7, 6]
    assert bag.predict(["a"]) == 0 and bag.predict(["c"]) == 1
    assert bag.predict(["b"]) == 1  # 2/6 against 2/7
    assert bag.predict(["never"]) == 1  # 1/6 against 1/7
    assert bag_of(["A red", "red"]) == ["0 a", "0 red", "1 red"]


def test_most_frequent_tags():
    train = [(["run", "run", "a"], ["N", "V", "D"]), (["run", "b"], ["V", "D"])]  # run: V, the others and all: D
    metric = TaggingMetric(classes=["D", "N", "V"])
    metric.update(["1"], [Sentence(["run", "a", "new", "run"], ["V", "D", "N", "D"], ["N"] * 4)])
    metric.compute()
    controls = tag_controls(metric, train)
    assert controls == {"word_accuracy@frequent": 2 / 4, "word_accuracy@constant": 2 / 4}
    metric.update(["2"], [Sentence(["run"], ["V"], ["V"])])
    metric.compute()
    assert tag_controls(metric, train) == {"word_accuracy@frequent": 3 / 5, "word_accuracy@constant": 2 / 5}
