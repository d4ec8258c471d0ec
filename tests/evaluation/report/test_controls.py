"""Findings about scores that a count of the training split reaches too."""

import re

import pytest

from vlm.evaluation.report.controls import below_controls
from vlm.evaluation.report.evaluation import scores_section

SCORES = {"test/loss": 1.0, "test/word_accuracy": 0.791, "test/word_accuracy@low": 0.78, "test/word_accuracy@high": 0.8}


@pytest.mark.parametrize(
    ("controls", "fault"),
    [
        ({"frequent": 0.808, "constant": 0.2}, "than frequent .*its word accuracy is 0.791, of frequent 0.808"),
        ({"frequent": 0.791}, "no better than frequent"),
        ({"frequent": 0.790}, None),
        ({"shuffled": 0.9, "low": 0.9}, None),  # not learned by counting
        ({}, None),
    ],
)
def test_a_model_is_compared_with_what_counts(controls, fault):
    results = SCORES | {f"test/word_accuracy@{name}": value for name, value in controls.items()}
    found = below_controls(results, ("word_accuracy", "span_f1"))
    assert len(found) == (fault is not None) and below_controls(results, ("span_f1",)) == []
    if fault is not None:
        assert re.search(fault, found[0].fault) and found[0].remedies


def test_a_ceiling_is_no_control():
    """Neither advice nor the report's note on controls takes the best possible score for a baseline."""
    scores = {"loss": 1.4, "loss@ceiling": 1.38, "accuracy": 0.48, "accuracy@ceiling": 0.49}
    assert below_controls({f"test/{name}": value for name, value in scores.items()}, ["accuracy"]) == []
    section = scores_section(scores)
    assert "<th>ceiling</th>" in section and "best score that is possible" in section
    assert "should beat" not in section
