"""Findings about scores that a count of the training split reaches too."""

import re

import pytest

from vlm.evaluation.report.controls import below_controls

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
