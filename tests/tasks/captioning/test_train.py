"""The doubly stochastic term against the sum that the paper writes, caption by caption."""

import pytest
import torch
from small import SCENES

from vlm.config.compose import compose
from vlm.data.batch import Targets, TextRows, next_token_labels
from vlm.tasks.captioning.train import doubly_stochastic_term
from vlm.training.image_cache import as_read
from vlm.training.run.build import build_data, build_model, build_task
from vlm.training.run.fit import main

SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 0, 0, 0]])


def test_the_term_is_the_papers_sum():
    tokens, weights = torch.arange(14).view(2, 7), torch.rand(2, 7, 5).softmax(-1)
    rows = TextRows(tokens, SEGMENTS, Targets.from_labels(next_token_labels(tokens, SEGMENTS)))
    total = doubly_stochastic_term(weights, rows)
    captions = [weights[0, 0:2], weights[0, 3:6], weights[1, 0:3]]  # the last token of each predicts nothing
    truth = sum((1 - caption.sum(0)).square().sum() for caption in captions)
    torch.testing.assert_close(total, truth)
    none = TextRows(torch.empty(0, 0, dtype=torch.long), torch.empty(0, 0), Targets.from_labels(torch.empty(0, 0)))
    assert float(doubly_stochastic_term(torch.empty(0, 0, 5), none)) == 0


@pytest.mark.slow
def test_the_loss_is_the_papers_sum_per_token(tmp_path):
    """Equation 14 of Xu et al. is a sum over captions; the loss of a step is that of all of them, over their tokens."""
    options = ["model=show_attend_tell", "model.size.dim=32", "trainer=cpu", f"runs={tmp_path}"]
    losses = []
    for weight in (0.0, 0.7):
        config = compose(["task=captioning", *SCENES, *options, f"task.doubly_stochastic={weight}"])
        data = build_data(config)
        data.prepare()
        task = build_task(config, build_model(config, data.sizes)[0], data)
        batch = next(iter(data.train_dataloader()))
        (term,) = task.loss(batch).values()
        losses.append(term.total.item())
        assert term.count == batch["captions"].targets.count
    rows = batch["captions"]
    context = task.model.encode(as_read(batch["images"], task.preprocess))
    weights = task.model.decoder.attend(rows.tokens, rows.segments, context)[1]
    assert losses[1] - losses[0] == pytest.approx(0.7 * doubly_stochastic_term(weights, rows).item(), rel=1e-4)


@pytest.mark.slow
def test_another_decoder_is_refused(tmp_path, capsys):
    quiet = ["trainer=cpu", "callbacks.progress=null", f"runs={tmp_path}"]
    assert main(["task=captioning", *SCENES, *quiet, "task.doubly_stochastic=1", "model.size.dim=96"]) == 2
    said = "task.doubly_stochastic: needs soft attention; choose model=show_attend_tell"
    assert said in capsys.readouterr().err
