"""The doubly stochastic term against the sum that the paper writes, caption by caption."""

import pytest
import torch
from small import SCENES

from vlm.data.batch import Targets, TextRows, next_token_labels
from vlm.tasks.captioning.doubly_stochastic import unevenness
from vlm.training.run.fit import main

SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0]])


def test_the_term_is_the_papers_sum():
    tokens, weights = torch.arange(14).view(2, 7), torch.rand(2, 7, 5).softmax(-1)
    rows = TextRows(tokens, SEGMENTS, Targets.of(next_token_labels(tokens, SEGMENTS)))
    total = unevenness(weights, rows)
    captions = [weights[0, 0:2], weights[0, 3:6], weights[1, 0:3]]  # the last token of each predicts nothing
    truth = sum((1 - caption.sum(0)).square().sum() for caption in captions)
    torch.testing.assert_close(total, truth)


def test_no_captions_have_no_term():
    empty = torch.empty(0, 0, dtype=torch.long)
    rows = TextRows(empty, empty, Targets.of(empty))
    assert float(unevenness(torch.empty(0, 0, 5), rows)) == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["model.size.dim=96"], "task.doubly_stochastic: needs soft attention; choose model=show_attend_tell"),
        (["task.doubly_stochastic=-1"], "task.doubly_stochastic: -1"),
    ],
)
def test_what_cannot_be_is_a_line(options, said, tmp_path, capsys):
    quiet = ["trainer=cpu", "callbacks.progress=null", f"runs={tmp_path}"]
    assert main(["task=captioning", *SCENES, *quiet, "task.doubly_stochastic=1", *options]) == 2
    assert said in capsys.readouterr().err
