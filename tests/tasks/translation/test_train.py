"""Scores of translations against the library, and the dictionary against a plain model 1."""

from collections import defaultdict

import numpy as np
import pytest
import sacrebleu

from vlm.data.records import ListSplit, Record
from vlm.evaluation.metrics.texts import NAMES, TextScores
from vlm.randomness import numpy_rng
from vlm.tasks.translation.train import ROUNDS, Dictionary, TranslatedText, TranslationMetric

SIDES = ("text", "translation")
TEXTS = ["the cat sat on the mat.", "a dog", "", "Zwei Männer, die\u00a0reden."]
TEXTS += ["birds fly over the old house by the sea"]
REFERENCES = ["the cat sat on a mat.", "a dog", "nothing", "Zwei Männer die reden!"]
REFERENCES += ["some birds fly over an old house by the sea"]


def test_scores_are_the_librarys_with_their_signatures():
    scores = TextScores(TEXTS, REFERENCES)
    assert scores.summary["bleu"] == sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score
    assert scores.summary["chrf"] == sacrebleu.corpus_chrf(TEXTS, [REFERENCES]).score
    assert scores.summary["exact_match"] == 0.2
    short, one_word = ["yes, of course", "no thanks", "maybe tomorrow we go", "ok"], ["yes", "no", "maybe", "ok"]
    (found,) = TextScores(short, one_word).score(np.ones((1, 4)))  # references that are too short for n-grams
    assert found[NAMES.index("chrf")] == pytest.approx(sacrebleu.corpus_chrf(short, [one_word]).score)
    signatures = scores.signatures()
    assert "case:mixed" in signatures["bleu"] and "tok:13a" in signatures["bleu"] and "nc:6" in signatures["chrf"]
    assert sacrebleu.__version__ in signatures["bleu"]


def test_resampled_scores_are_those_of_the_texts_written_out():
    scores, rng = TextScores(TEXTS, REFERENCES), numpy_rng("resampled")
    draws = np.vstack([np.ones(5), rng.multinomial(5, [0.2] * 5, size=6)])
    found = scores.score(draws.astype(float))
    for row, counts in zip(found, draws.astype(int), strict=True):
        texts, references = (np.repeat(np.array(side, object), counts).tolist() for side in (TEXTS, REFERENCES))
        truth = TextScores(texts, references).summary
        np.testing.assert_allclose(row, [truth[name] for name in NAMES], rtol=1e-12)
    many = TextScores(TEXTS * 8, REFERENCES * 8)
    ends = many.intervals(seed=0)
    assert all(ends[f"{name}@low"] < many.summary[name] < ends[f"{name}@high"] for name in NAMES)


def test_a_metric_is_exact_over_batches():
    rows = list(zip(TEXTS, TEXTS, REFERENCES, range(5), strict=True))
    metric = TranslationMetric()
    for order in ((3, 1), (4, 0, 2), (1,)):  # a sampler may repeat a sample
        metric.update([f"test-{at}" for at in order], [TranslatedText(*rows[at]) for at in order])
    results = metric.compute()
    assert {name: results[name] for name in NAMES} == TextScores(TEXTS, REFERENCES).summary
    assert metric.samples["test-3"] == TranslatedText(*rows[3])
    assert results["length_ratio"] == pytest.approx((6 + 2 + 0 + 3 + 9) / (6 + 2 + 1 + 4 + 10))


def plain_model_1(pairs):
    """The likeliest translation of each word, by loops over pairs (Brown et al. 1993, model 1, with the empty word)."""
    table = defaultdict(lambda: 1.0)
    for _ in range(ROUNDS):
        counts, totals = defaultdict(float), defaultdict(float)
        for text, translation in pairs:
            source = [None, *text.split(" ")]
            for word in translation.split(" "):
                norm = sum(table[word, one] for one in source)
                for one in source:
                    counts[word, one] += table[word, one] / norm
                    totals[one] += table[word, one] / norm
        table = defaultdict(float, {(word, one): count / totals[one] for (word, one), count in counts.items()})
    best = {}
    for (word, one), value in table.items():
        if one is not None and value > best.get(one, ("", 0.0))[1]:
            best[one] = word, value
    return {one: word for one, (word, _) in best.items()}


def random_pairs(count=60):
    """Texts of words with a translation each, in another order, some left out."""
    rng = numpy_rng("pairs")
    for _ in range(count):
        words = rng.integers(12, size=rng.integers(2, 6)).tolist()
        kept = [word for word in rng.permutation(words).tolist() if rng.random() < 0.9] or words
        yield " ".join(f"w{word}" for word in words), " ".join(f"v{word}" for word in kept)


def test_a_dictionary_learns_what_stands_for_what():
    pairs = list(random_pairs())
    dictionary, truth = Dictionary(pairs), plain_model_1(pairs)
    assert {word: dictionary.translate(word) for word in truth} == truth
    assert dictionary.translate("w3 w1 w7") == "v3 v1 v7"


def test_a_dictionary_copies_the_unknown_and_keeps_no_break_spaces():
    dictionary = Dictionary([("one\u00a0two three", "einszwei drei"), ("three", "drei")])
    assert dictionary.translate("three  four") == "drei four"
    assert dictionary.translate("one\u00a0two") == "einszwei"


def test_a_dictionary_is_scored_beside_the_translations():
    metric = TranslationMetric()
    metric.update(["1"], [TranslatedText("a b", "x", "y z", 1.0)])
    metric.compute()
    pairs = [("a", "y"), ("b", "z"), ("a b", "y z")]
    found = metric.dictionary(ListSplit(pairs, lambda pair, epoch: Record("", dict(zip(SIDES, pair, strict=True)))))
    assert found["exact_match@dictionary"] == 1.0 and set(found) == {f"{name}@dictionary" for name in NAMES}
