"""The losses under control, and what the callback makes of them."""

from types import SimpleNamespace

import pytest
import torch
from small import command

from vlm.data.batch import IGNORE, PromptRows, Targets, TextRows
from vlm.data.records import find_partner
from vlm.models.context import PLACE, Context
from vlm.nn.vocabulary_loss import Head
from vlm.tasks.captioning.metrics import LanguageMetrics
from vlm.tasks.shared.image_use import ImageUseMonitor, Pixels, are_preprocessed_differently
from vlm.tasks.shared.text_tasks import GroundingLosses
from vlm.training.run.fit import main
from vlm.training.step.losses import row_losses, token_loss


def context(*values: float) -> Context:
    return Context(torch.tensor(values)[:, None, None])


def rows(values: list[float], places: list[int]) -> TextRows:
    """Captions of one token each, which name the state of the right image."""
    return TextRows(torch.tensor(values)[:, None], None, Targets(torch.empty(0), None), indices=places)


def measure_use(
    split: list[float], batches: list[list[int]], *, world: int = 1, weight: float = 1.0
) -> dict[str, float]:
    """A loss of one token an image that is the distance of the image's state from the one its caption names."""

    def losses(captions: TextRows, images: Context) -> tuple[torch.Tensor, torch.Tensor]:
        distance = (images.states[:, 0] - captions.tokens).abs()[:, 0] * weight
        return distance, torch.ones(len(distance))

    ranks = [GroundingLosses(len(split), torch.device("cpu")) for _ in range(world)]
    for number, batch in enumerate(batches):
        own = rows([split[place] for place in batch], batch)
        others = [find_partner(place, len(split)) for place in batch]
        own.partners = rows([split[place] for place in others], others)
        right = context(*(split[place] for place in batch))
        ranks[number % world].read(losses, own, right, blank=context(0.0))
    return ranks[0].results(10.0, lambda tensor: sum((rank._sums for rank in ranks[1:]), tensor))


def test_what_the_controls_add_to_the_loss() -> None:
    # Half the split away: 1 with 3, 2 with 5, 3 with 1, 5 with 2.
    found = measure_use([1.0, 2.0, 3.0, 5.0], [[0, 1, 2, 3]])
    assert found == {"loss@shuffled": pytest.approx(10 + 10 / 4), "loss@blank": pytest.approx(10 + 11 / 4)}
    ignoring = measure_use([1.0, 2.0, 3.0], [[0, 1, 2]], weight=0.0)
    assert ignoring == {"loss@shuffled": 10, "loss@blank": 10}
    assert measure_use([1.0], [[0]]) == {"loss@blank": 11}  # one sample has no other
    # The first is not read: its captions have no loss of their own, and those of the third stand beside no image.
    assert measure_use([1.0, 2.0, 3.0, 5.0], [[1, 2, 3]])["loss@shuffled"] == pytest.approx(10 + (3 + 3) / 2)


def test_samples_without_an_image_have_no_controls() -> None:
    """The first and the third have none, and are partners; their loss is 1 whatever image there is."""

    def rows(samples: list[int]) -> PromptRows:
        tokens = torch.tensor([[PLACE if sample % 2 else 0, sample] for sample in samples])
        targets, states = Targets(torch.empty(0), None), torch.zeros_like(tokens)
        return PromptRows(tokens, None, targets, indices=samples, image_states=states, num_states=[])

    def losses(texts: TextRows, images: Context) -> tuple[torch.Tensor, torch.Tensor]:
        distance = (images.states[:, 0, 0] - texts.tokens[:, 1]).abs()
        return torch.where((texts.tokens == PLACE).any(1), distance, 1.0), torch.ones(len(distance))

    measured, own = GroundingLosses(4, torch.device("cpu")), rows([0, 1, 2, 3])
    own.partners = rows([2, 3, 0, 1])
    measured.read(losses, own, context(0.0, 1.0, 2.0, 3.0), blank=context(0.0))
    found = measured.results(10.0, lambda tensor: tensor)
    assert found == {"loss@shuffled": 10 + (2 + 2) / 2, "loss@blank": 10 + (1 + 3) / 2}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_neither_batches_nor_processes_change_a_control(size: int, world: int) -> None:
    split = torch.rand(7).tolist()
    batches = [[*range(start, min(7, start + size))] for start in range(0, 7, size)]
    assert measure_use(split, batches, world=world) == measure_use(split, [[*range(7)]])


def test_row_losses_are_those_of_the_rows_alone() -> None:
    hidden, labels = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    labels[0, 2:] = labels[2] = IGNORE
    sums, counts = row_losses(hidden, Targets.from_labels(labels), Head(torch.eye(7)))
    assert sums[2] == counts[2] == 0
    for row in range(2):
        total, count = token_loss(hidden[row : row + 1], Targets.from_labels(labels[row : row + 1]), Head(torch.eye(7)))
        assert counts[row] == count
        assert sums[row].item() == pytest.approx(total.item(), rel=1e-5)


DIFFERENT = [f"caption {n}" for n in range(100)]


def task(captions: list[str], references: int) -> SimpleNamespace:
    images, metrics = [f"image {n}" for n in range(len(captions))], LanguageMetrics([])
    metrics.first.update(images, captions, [[f"text {n % references}"] for n in range(len(images))])
    metrics.compute()
    return SimpleNamespace(metrics=metrics)


@pytest.mark.parametrize(
    ("shuffled", "captions", "references", "expected"),
    [
        (1.2, DIFFERENT, 100, set()),
        (1.005, DIFFERENT, 100, {"gap"}),
        (0.9, ["the same"] * 100, 100, {"gap", "distinct"}),
        (1.2, ["one", "two"] * 50, 100, {"distinct"}),
        (1.2, ["one", "two"] * 50, 20, set()),  # data that say little themselves
        (1.2, ["the same"] * 100, 4, set()),
    ],
)
def test_signs(shuffled: float, captions: list[str], references: int, expected: set[str]) -> None:
    results = {"loss": 1.0, "loss@shuffled": shuffled}
    assert {name for name, _ in ImageUseMonitor().signs(results, task(captions, references))} == expected


@pytest.mark.slow
def test_a_training_hears_the_warning(tmp_path, capsys) -> None:
    """At the start other images add less to the loss than the loss itself, which is the bound here."""
    bound = ["callbacks.grounding.min_gap=1", "callbacks.grounding.patience=1", "trainer.max_epochs=1", "test=false"]
    assert main([*command("captioning"), *bound, f"runs={tmp_path}"]) == 0
    assert "warning: in a validation, the model ignored its images: the loss is" in capsys.readouterr().err


@pytest.mark.slow
def test_a_test_says_what_is_wrong_and_the_report_does(tmp_path, capsys) -> None:
    """Two steps teach no end, and one caption for all scenes."""
    patience = ["callbacks.grounding.patience=1", "task.val_captions=null", "trainer.max_steps=2"]
    assert main([*command("captioning"), *patience, f"runs={tmp_path}"]) == 0
    captured = capsys.readouterr()
    fault = "the captions do not end: 12 of 12 end at the limit of 6 tokens\n  1. train longer (trainer.max_epochs)"
    assert fault in captured.out and "warning: in a validation, the captions do not end: 20 of 20" in captured.err
    (page,) = tmp_path.glob("*/*/evaluation/test/report.html")
    assert "What is wrong" in page.read_text() and fault in page.read_text()


def test_images_prepared_in_different_ways_are_told_and_streaks_are_kept() -> None:
    assert not are_preprocessed_differently(Pixels(0.1, 1.0), Pixels(-0.1, 0.8))
    assert are_preprocessed_differently(Pixels(0.0, 1.0), Pixels(100.0, 60.0)) and are_preprocessed_differently(
        Pixels(0.0, 1.0), Pixels(0.0, 0.1)
    )
    one, other = ImageUseMonitor(), ImageUseMonitor()
    one.streaks, one.losses, one.warned = {"gap": 2, "distinct": 0, "text": 1}, [1.0, 1.0], {"text"}
    other.load_state_dict(one.state_dict())
    assert (other.streaks, other.losses, other.warned) == (one.streaks, one.losses, one.warned)
    other.load_state_dict({"streaks": {"gap": 1}, "losses": []})  # an older checkpoint
    assert other.warned == set()


@pytest.mark.slow
def test_a_warning_comes_once_and_not_in_the_first_half_of_a_run(tmp_path, capsys) -> None:
    """Ten epochs of six steps: the bound is such that each validation has the sign."""
    bound = ["callbacks.grounding.min_gap=1", "callbacks.grounding.patience=2", "trainer.max_epochs=10", "test=false"]
    few = ["data.source.train_scenes=24", "data.source.val_scenes=6"]
    assert main([*command("captioning"), *bound, *few, f"runs={tmp_path}"]) == 0
    told = capsys.readouterr()
    assert told.err.count("the model ignored its images") == 1
    before = told.err + told.out
    causes = before.partition("likely causes:\n")[2]
    assert causes.startswith("  - few steps: 15 so far; train longer")  # of 30, after five epochs


def test_too_few_steps_are_the_first_cause() -> None:
    """Before any sign, such as that of images that are not normalised: so few steps cause these too."""
    encoder = torch.nn.Linear(1, 1).requires_grad_(False)
    ours = SimpleNamespace(model=SimpleNamespace(encoder=encoder), evaluation=SimpleNamespace(samples=[]))
    for steps in (6, 5000):
        trainer = SimpleNamespace(global_step=steps, optimizers=[])
        first, *others = ImageUseMonitor().causes(trainer, ours)  # type: ignore[arg-type]
        assert first.startswith("few steps: 6 so far" if steps == 6 else "a frozen encoder")
        assert len(others) == (2 if steps == 6 else 1)
