"""Students that learn from teachers: the loss of each task by hand, wrong teachers, and whole runs."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chats import saved_chat
from distillation_tasks import build, first_batch, student_options
from tiny_checkpoints import FILES
from torch import Tensor
from transformers import AutoModelForCausalLM

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.file import write
from vlm.cli.main import run as vlm
from vlm.data.batch import Batch
from vlm.data.images.image import Preprocess
from vlm.errors import UserError
from vlm.randomness import seed_torch
from vlm.tasks.shared.distillation import renormalize

TASKS = ("captioning", "classification", "language_modeling", "text_classification")


def logits_of(task: Any, model: Any, batch: Batch, images: Tensor | None) -> Tensor:
    """Logits of all labelled positions or samples by a model, computed at once."""
    if task.name == "classification":
        return model(images)
    if task.name == "text_classification":
        rows = batch["texts"]
        return model(rows.tokens, rows.segments, rows.types, rows.layout)
    rows = batch[task.distillation.text_field]
    if task.name == "captioning":
        hidden = model(images, rows.tokens, rows.segments)
    else:
        segments = None if rows.segments is None else rows.segments[:, :-1]
        hidden = model(rows.tokens[:, :-1], segments)
    return model.head(rows.targets.pick(hidden))


@pytest.mark.sample(plain=1, slow=4)
@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_that_by_hand_and_gradients_reach_the_student_alone(name: str, tmp_path: Path) -> None:
    options = ["task.teacher.temperature=3", "task.teacher.weight=0.7", f"runs={tmp_path}"]
    task = build(name, *options, "task.label_smoothing=0.1", "model.size.dropout=0")
    batch = first_batch(task)
    task.distillation.prepare()
    task.train()
    seed_torch(5, task.device)  # of mixed images
    terms = task.loss(batch)
    assert list(terms) == list(task.counts(batch)) and {term.count for term in terms.values()} == {
        *task.counts(batch).values()
    }
    seed_torch(5, task.device)
    images = None if task.preprocess is None else task.preprocess.normalize(batch["images"])
    labels = batch["labels"] if "labels" in batch.values else batch[task.distillation.text_field].targets.labels
    if name == "classification":
        images, labels = task.mixing(images, labels)
    teacher = ckpt.load_model(ckpt.read(FILES / f"{name}.ckpt"))
    own, theirs = (logits_of(task, model, batch, images) for model in (task.model, teacher))
    truth = F.cross_entropy(own, labels, reduction="sum", label_smoothing=0.1)
    p, q = (theirs / 3).softmax(-1), (own / 3).softmax(-1)
    divergence = (p * (p / q).log()).sum()
    total = sum(term.weight * term.total for term in terms.values())
    torch.testing.assert_close(total, 0.3 * truth + 0.7 * 9 * divergence, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(terms["teacher"].total, divergence, rtol=1e-3, atol=1e-5)
    assert divergence > 1e-3
    total.backward()
    assert not any(parameter.requires_grad for parameter in task.distillation.model().parameters())
    assert all(part.training is False for part in task.distillation.model().modules())
    assert not any("teacher" in key or "distillation" in key for key in task.state_dict())
    assert any(parameter.grad.abs().sum() > 0 for parameter in task.model.parameters() if parameter.grad is not None)


@pytest.mark.slow
def test_a_folder_of_hugging_face_teaches_as_transformers_predicts(tmp_path: Path) -> None:
    saved_chat(tmp_path / "theirs", "chatml")
    tokens = [f"tokenizer=pretrained tokenizer.path={tmp_path / 'theirs'}"]
    options = [*tokens[0].split(), "task.teacher.temperature=1", "task.teacher.weight=1", "task.teacher.beta=1"]
    task = build("language_modeling", *options, f"runs={tmp_path}", teacher=tmp_path / "theirs")
    batch = first_batch(task)
    task.distillation.prepare()
    found = task.eval().loss(batch)["teacher"].total
    rows, theirs = batch["text"], AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    total = torch.zeros(())
    for tokens, segments in zip(rows.tokens, rows.segments, strict=True):
        for number in segments[:-1].unique().tolist():
            text = tokens[:-1][segments[:-1] == number]
            predicts = (segments[1:] == segments[:-1])[segments[:-1] == number]
            own, teacher = (
                logits[0, predicts].log_softmax(-1)
                for logits in (task.model.head(task.model(text[None])), theirs(text[None]).logits)
            )
            total = total + (own.exp() * (own - teacher)).sum()  # reverse divergence
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-3)


def test_a_teacher_has_its_own_normalisation_of_the_same_pixels() -> None:
    ours, theirs = (
        Preprocess(image_size=8, mean=[mean] * 3, std=[std, 1, std]) for mean, std in ((0.5, 0.5), (0.1, 2))
    )
    pixels = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    found = renormalize(ours.normalize(pixels), ours, theirs)
    torch.testing.assert_close(found, theirs.normalize(pixels), rtol=1e-5, atol=1e-6)
    images = ours.normalize(pixels)
    assert renormalize(images, ours, ours) is images


def changed_teacher(folder: Path, name: str, **changes: Any) -> Path:
    """A copy of a small checkpoint with other metadata."""
    loaded: Any = dict(ckpt.read(FILES / f"{name}.ckpt"))
    loaded["vlm"] = {**loaded["vlm"], **changes}
    path = folder / "teacher.ckpt"
    write(path, loaded)
    return path


@cache
def read_stored(name: str) -> Any:
    return ckpt.read(FILES / f"{name}.ckpt")["vlm"]


WRONG: dict[str, tuple[str, dict[str, Any], list[str], str]] = {
    "tokenizer": (
        "language_modeling",
        {},
        ["tokenizer=bytes"],
        r"its tokenizer differs from the student's \(learned from its training data\); set tokenizer=pretrained "
        r"tokenizer\.path=.*teacher\.ckpt",
    ),
    "classes in another order": (
        "classification",
        {"classes": lambda classes: [*classes[1:], classes[0]]},
        [],
        "class 0 is '.*', in the student's data .* '.*'; use a teacher of the same classes in the same order",
    ),
    "fewer classes": (
        "classification",
        {"classes": lambda classes: classes[:-1]},
        [],
        r"has \d+ classes, the student's data \(its training data\) \d+",
    ),
    "image size": (
        "classification",
        {},
        ["data.image_size=48"],
        "was trained on images with image_size=32, the student's have 48; set data.image_size=32",
    ),
    "resizing": (
        "captioning",
        {"preprocess": lambda state: {**state, "resize": "pad"}},
        [],
        "was trained on images with resize=pad, the student's have .*; set data.preprocess.resize=pad",
    ),
    "positions": (
        "language_modeling",
        {},
        ["data.max_len=48"],
        "reads at most 32 tokens, but task.fields.text.max_len is 48; set data.max_len=32",
    ),
    "pairs": (
        "text_classification",
        {"pairs": lambda pairs: not pairs},
        [],
        "reads single texts, the student pairs of texts",
    ),
    "features": (
        "classification",
        {},
        ["data.cache_features=true", "task.freeze=[encoder]", "task.mixup=0", "task.cutmix=0", "data.augment=null"],
        "but the student reads cached features of its encoder; set data.cache_features=false",
    ),
}


@pytest.mark.sample(plain=1, slow=8)
@pytest.mark.parametrize("case", WRONG)
def test_a_teacher_that_does_not_fit_is_refused_with_both_files_and_a_remedy(case: str, tmp_path: Path) -> None:
    name, changes, options, reason = WRONG[case]
    changes = {key: change(read_stored(name)[key]) for key, change in changes.items()}
    teacher = changed_teacher(tmp_path, name, **changes)
    task = build(name, *options, f"runs={tmp_path}", teacher=teacher)
    with pytest.raises(UserError, match=rf"^task\.teacher\.path={re.escape(str(teacher))}: .*{reason}"):
        task.distillation.prepare()


@pytest.mark.slow
def test_check_data_names_a_teacher_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    teacher = [f"task.teacher.path={FILES / 'language_modeling.ckpt'}"]
    assert vlm(["check-data", *student_options("language_modeling", *teacher)]) == 0
    assert "teacher     " in capsys.readouterr().out
    assert vlm(["check-data", *student_options("language_modeling", *teacher, "tokenizer=bytes")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"STOPS task\.teacher\.path=.*\.ckpt: its tokenizer differs .* set tokenizer=pretrained", said), (
        said
    )


@pytest.mark.slow
def test_a_model_of_another_task_is_no_teacher(tmp_path: Path) -> None:
    task = build("classification", f"runs={tmp_path}", teacher=FILES / "captioning.ckpt")
    with pytest.raises(UserError, match="is a VisionLanguageModel, which task=classification does not train"):
        task.distillation.prepare()
    task = build("classification", f"runs={tmp_path}")
    task.use_start(lambda: None, {"teacher": "another"})
    with pytest.raises(UserError, match=r"task\.teacher\.path: the teacher has other weights than when training began"):
        task.distillation.prepare()


OPTIONS_WITHOUT_EFFECT = {
    "no teacher": (["task.teacher.path=null", "task.teacher.temperature=4"], "teacher.temperature: has no effect"),
    "zero": (["task.teacher.weight=0"], r"task.teacher.weight: 0 is out of range, .* \(above 0 and at most 1\)"),
    "path alone": (["task.teacher=a.ckpt"], "task.teacher: a.ckpt is not a group .*; set task.teacher.path=a.ckpt"),
    "smoothing": (["task.teacher.weight=1", "task.label_smoothing=0.1"], "task.label_smoothing: has no effect"),
    "z loss": (["task.teacher.weight=1", "task.z_loss=0.1"], "task.z_loss: has no effect"),
    "too many": (["task.teacher.top_k=1000"], "top_k: 1000 is not less than the [0-9]+ outcomes"),
}


@pytest.mark.sample(plain=1, slow=6)
@pytest.mark.parametrize("case", OPTIONS_WITHOUT_EFFECT)
def test_options_without_effect_are_refused(case: str, tmp_path: Path) -> None:
    options, reason = OPTIONS_WITHOUT_EFFECT[case]
    with pytest.raises(UserError, match=reason):
        build("language_modeling", *options, f"runs={tmp_path}").distillation.prepare()


@pytest.mark.slow
def test_a_reward_is_not_combined_with_a_teacher(tmp_path: Path) -> None:
    start = [f"model.init_from={FILES / 'captioning.ckpt'}", "task.reward=cider"]
    with pytest.raises(UserError, match=r"task\.reward: cannot be combined with task\.teacher"):
        build("captioning", *start, f"runs={tmp_path}")
