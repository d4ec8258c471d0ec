"""Training on preferences, beside TRL and transformers."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import preference_steps as steps
import pytest
import torch
import torch.nn.functional as F
from chats import saved_chat
from image_text import saved_image_text
from journey import interrupt_at, only_run, same_weights
from prompted_steps import picture
from transformers import AutoModelForCausalLM, AutoTokenizer

from vlm.cli.main import run as command
from vlm.data.records import Record
from vlm.errors import UserError
from vlm.tasks.preferences.metrics import PreferenceMetric, ScoredPair
from vlm.tasks.preferences.train import build_objective

FIXTURE = json.loads((Path(__file__).parents[2] / "checkpoint" / "files" / "trl_preferences.json").read_text())


@pytest.mark.sample(plain=3, slow=6)
@pytest.mark.parametrize("case", steps.CASES)
def test_loss_rewards_and_gradients_are_those_of_trl(tmp_path: Path, case: str) -> None:
    """The fixture is what benchmarks/references/trl.sh wrote with DPOTrainer and CPOTrainer of TRL 1.16.0."""
    start, reference = steps.save_models(tmp_path, case)
    ours, theirs = steps.compute(steps.build_task(start, reference, case), steps.make_records(case)), FIXTURE[case]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["rewards"] == pytest.approx(theirs["rewards"], abs=1e-5)
    assert ours["gradients"].keys() == theirs["gradients"].keys()
    for name, (norm, *values) in theirs["gradients"].items():
        assert norm > 0, name
        assert ours["gradients"][name] == pytest.approx([norm, *values], abs=2e-5 * max(1, norm)), name


def test_the_loss_is_that_of_transformers_with_smoothed_labels(tmp_path: Path) -> None:
    case, beta, smoothing = "text dpo", 0.3, 0.2
    start, reference = steps.save_models(tmp_path, case)
    records, logprobs = steps.make_records(case), []
    for folder in (start, reference):
        theirs, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(start)
        for row in steps.to_rows(records):
            prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
            for answer in ("chosen", "rejected"):
                ids = tokenizer.apply_chat_template([*row["prompt"], *row[answer]], return_dict=False)
                tokens = torch.tensor([ids])
                with torch.no_grad():
                    losses = F.cross_entropy(theirs(tokens).logits[0, :-1], tokens[0, 1:], reduction="none")
                logprobs.append(-losses[len(prompt) - 1 :].sum())
    ours, reference_logprobs = torch.stack(logprobs).view(2, -1, 2)
    ratios = beta * (ours - reference_logprobs)
    margin = ratios[:, 0] - ratios[:, 1]
    truth = -(1 - smoothing) * margin.sigmoid().log() - smoothing * (-margin).sigmoid().log()
    task = steps.build_task(start, reference, case)
    task.objective = build_objective("dpo", beta, None, smoothing)
    assert steps.compute(task, records)["loss"] == pytest.approx(truth.mean().item(), rel=1e-5)


@pytest.mark.parametrize("case", ["text dpo", "images ipo"])
def test_packed_pairs_have_the_losses_and_gradients_of_padded_ones(tmp_path: Path, case: str) -> None:
    start, reference = steps.save_models(tmp_path, case)
    records = steps.make_records(case)
    packed = steps.compute(steps.build_task(start, reference, case), records)
    alone = [Record(record.id, {"pairs": [pair]}, record.open_image) for record in records for pair in record["pairs"]]
    task = steps.build_task(start, reference, case)
    assert (
        len(steps.make_batch(task, alone)["pairs"].tokens) == 6 > len(steps.make_batch(task, records)["pairs"].tokens)
    )
    padded = steps.compute(task, alone)
    assert packed["loss"] == pytest.approx(padded["loss"], rel=1e-5)
    for name, values in padded["gradients"].items():
        assert packed["gradients"][name] == pytest.approx(values, abs=2e-5), name


def test_a_row_has_the_pairs_that_fit_and_every_epoch_others(tmp_path: Path) -> None:
    start, reference = steps.save_models(tmp_path, "text dpo")
    field: Any = steps.build_task(start, reference, "text dpo").fields["pairs"]
    record = steps.make_records("text dpo")[0]
    lengths = [count for _, count in field.lengths(record)]
    field.max_len = max(lengths)
    rows = [field.collate([field.encode(record, (0, epoch, 0))]) for epoch in range(8)]
    assert {len(row.pairs.names) for row in rows} == {1} and len({row.pairs.names[0] for row in rows}) == 2
    field.max_len = sum(lengths)
    assert len(field.collate([field.encode(record, (0, 0, 0))]).pairs.names) == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("dpo", None, 1.0, 0.0), "task.gamma: has no effect on task.loss=dpo"),
        (("ipo", None, None, 0.1), "task.label_smoothing: is not supported by task.loss=ipo"),
        (("dpo", None, None, 0.5), "task.label_smoothing: 0.5 would prefer the rejected answers"),
    ],
)
def test_options_without_effect_are_refused(options: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        build_objective(*options)


def test_a_reference_must_be_a_model_of_the_same_kind(tmp_path: Path) -> None:
    start, reference = steps.save_models(tmp_path, "text dpo")
    saved_chat(tmp_path / "other", "llama3")
    task = steps.build_task(start, tmp_path / "other", "text dpo")
    with pytest.raises(UserError, match=r"task\.reference=.*other: has another tokenizer than the model"):
        steps.compute(task, steps.make_records("text dpo"))
    config = json.loads((reference / "config.json").read_text())
    (reference / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    theirs = AutoModelForCausalLM.from_pretrained(reference)
    theirs.save_pretrained(reference)
    task = steps.build_task(start, reference, "text dpo")
    with pytest.raises(
        UserError, match=r"task\.reference=.*: blocks\.1\..* differs from the model's; use a model of the"
    ):
        steps.compute(task, steps.make_records("text dpo"))


def test_scores_of_pairs_and_their_controls() -> None:
    metric = PreferenceMetric()

    def pair(image: str, rewards: tuple[float, float], tokens: tuple[int, int], loss: float = 1.0) -> ScoredPair:
        return ScoredPair(image, "what?", "a", "b", loss, rewards, (-1.0, -2.0), tokens)

    own = {"a#0": pair("a", (1, 0), (5, 3)), "a#1": pair("a", (0, 1), (3, 3)), "b#0": pair("b", (2, -1), (4, 5))}
    own |= {"c#0": pair("c", (1, 1), (9, 2))}
    metric.update([*own], [*own.values()])
    metric.update(["b#0"], [pair("b", (0, 1), (4, 5), 3.0)], "blank")
    metric.update(["b#0"], [own["b#0"]])  # of another process, counted once
    assert metric.compute() == {
        "accuracy": 0.5,  # equal rewards are no preference
        "accuracy_logprob": 1.0,
        "reward_chosen": 1.0,
        "reward_rejected": 0.25,
        "margin": 0.75,
    }
    assert metric.compute_controls(1.0) == {"accuracy@length": 0.625, "accuracy@blank": 0.0, "loss@blank": 3.0}
    weighted = PreferenceMetric(cross_entropy=0.5)
    weighted.update(["b#0"], [own["b#0"]])
    weighted.update(["b#0"], [own["b#0"]._replace(loss=3.0, logprobs=(-9.0, -2.0))], "blank")
    weighted.compute()
    assert weighted.compute_controls(1.0)["loss@blank"] == 1 + 2 + 0.5 * 8 / 4
    *scorers, records = metric.scorers("blank")
    assert records == 1 and [scorer(np.ones((1, 1))).item() for scorer in scorers] == [1, 0]
    assert metric.scorers("length")[2] == 3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Pairs about ten images, and some without an image."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows: list[dict[str, Any]] = []
    for number in range(10):
        picture(number).save(folder / f"{number}.png")
        row = {"image": f"{number}.png", "split": "train" if number < 7 else "val"}
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is it?"}]}]
        answers = ([{"role": "assistant", "content": text}] for text in (f"a cat {number}", "a dog or so"))
        rows.append(row | dict(zip(("chosen", "rejected"), answers, strict=True)) | {"prompt": prompt})
        rows.append(row | {"prompt": "and the color?", "chosen": f"red {number}", "rejected": "blue"})
    talk = [[{"role": "user", "content": "hello"}, {"role": "assistant", "content": text}] for text in ("yes", "no")]
    rows.append({"chosen": talk[0], "rejected": talk[1], "split": "train"})
    rows.append({"prompt": "hello there", "chosen": "yes", "rejected": "no", "split": "val"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [{name: value for name, value in row.items() if name != "image"} for row in rows]
    texts = [row for row in texts if "<image>" not in str(row) and "'image'" not in str(row)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


def training(folder: Path, table: Path, *options: str) -> list[str]:
    words = ["train", "model=pretrained", f"model.path={folder}", "task=preferences", "trainer=cpu"]
    words += ["data=preferences", f"data.path={table}", "data.num_workers=0", "data.batch_size=4", "seed=3"]
    return [*words, "trainer.max_epochs=3", "schedule_steps=6", "trainer.precision=32-true", *options]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["model/adapt=lora", "task.loss=ipo"],
        ["task.cache_reference=true", "task.freeze=[encoder.backbone]"],
        ["task.loss=simpo", "task.label_smoothing=0.1"],
    ],
    ids=["whole", "lora", "cached reference", "no reference"],
)
def test_a_killed_run_ends_with_the_same_weights(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    saved_image_text(tmp_path / "theirs", "smolvlm_tiles")
    words = training(tmp_path / "theirs", data / "pairs.jsonl", "test=false", *options)
    ends = []
    for kind in ("whole", "killed"):
        (tmp_path / kind).mkdir()
        monkeypatch.chdir(tmp_path / kind)
        if kind == "whole":
            assert command(words) == 0
        else:
            with monkeypatch.context() as patch:
                interrupt_at(4, 15, patch)
                assert command(words) == 143
            assert command(["train", "resume=last"]) == 0
        ends.append(only_run(Path("runs").resolve()) / "checkpoints" / "last.ckpt")
    assert same_weights(*ends)


@pytest.mark.slow
def test_a_cached_reference_changes_nothing_but_rounding(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_image_text(tmp_path / "theirs", "smolvlm_tiles")
    scores = []
    for kind in ("false", "true", "true"):
        (tmp_path / f"{len(scores)}").mkdir()
        monkeypatch.chdir(tmp_path / f"{len(scores)}")
        cached = f"task.cache_reference={kind}"
        assert command(training(tmp_path / "theirs", data / "pairs.jsonl", f"runs={tmp_path / kind}", cached)) == 0
        (path,) = sorted((tmp_path / kind).glob("*/*/evaluation/val/metrics.json"))[-1:]
        scores.append(json.loads(path.read_text()))
    assert len([*(tmp_path / "true" / "cache").glob("*.reference.json")]) == 2  # of train and val, once
    assert scores[1] == scores[2]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["model/adapt=lora"]], ids=["whole", "lora"])
def test_a_chat_model_is_trained_evaluated_and_exported(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    saved_chat(tmp_path / "theirs", "chatml")
    monkeypatch.chdir(tmp_path)
    table = data / "texts.jsonl"
    assert command(["check-data", *training(tmp_path / "theirs", table)[1:]]) == 0
    assert "conversations of up to" in capsys.readouterr().out
    assert command(training(tmp_path / "theirs", table, *options)) == 0
    assert "vlm generate --prompt" in capsys.readouterr().out
    run = str(only_run(Path("runs").resolve()))
    assert command(["evaluate", "-c", run, "--out", "scores", "--device", "cpu"]) == 0
    (own,) = Path(run).glob("evaluation/val/metrics.json")
    scores = json.loads((tmp_path / "scores" / "metrics.json").read_text())
    assert scores == pytest.approx(json.loads(own.read_text()), rel=1e-4, abs=1e-6)  # merged adapters round
    assert command(["export", "tuned", "-c", run, "--to", "huggingface"]) == 0
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained("tuned").eval(), AutoTokenizer.from_pretrained("tuned")
    messages = [{"role": "user", "content": "hello there"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    written = theirs.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    from vlm.api import load

    chat = load(run, device="cpu", precision="fp32").chat(temperature=0, max_tokens=4)
    assert chat.say("hello there") == tokenizer.decode(written, skip_special_tokens=True).strip()


@pytest.mark.slow
def test_tables_of_pairs_are_mixed(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_image_text(tmp_path / "theirs", "smolvlm")
    monkeypatch.chdir(tmp_path)
    words = [word for word in training(tmp_path / "theirs", data / "pairs.jsonl") if not word.startswith("data.path=")]
    entries = ", ".join(f"{{data: preferences, path: {data / name}.jsonl}}" for name in ("pairs", "texts"))
    words += ["data=mix", f"data.mix=[{entries}]", "data.epoch_size=12", "trainer.max_epochs=1"]
    words.remove("data=preferences")
    assert command(words) == 0
    (path,) = only_run(Path("runs").resolve()).glob("evaluation/val/predictions.json")
    ids = {row["image_id"].partition("/")[0] for row in json.loads(path.read_text())}
    assert ids == {"0", "1"} and "train 12, val" in capsys.readouterr().out
    assert command([*words, "task.cache_reference=true"]) == 2
    assert "task.cache_reference: other samples are read in every epoch" in capsys.readouterr().err


WRONG = {
    "longer than the context": ({"chosen": "a " * 3000}, "a conversation has [0-9,]+ tokens .*; set data.max_len="),
    "equal": ({"chosen": "blue"}, "chosen equals rejected"),
    "empty": ({"rejected": ""}, "rejected is an empty answer"),
    "prompts differ": (
        {
            "prompt": None,
            "chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "rejected": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}],
        },
        "the prompts of chosen and rejected differ",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "reason"), WRONG.values(), ids=WRONG)
def test_wrong_pairs_are_named_by_check_data_and_before_training(
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    reason: str,
) -> None:
    saved_image_text(tmp_path / "theirs", "smolvlm")
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in (data / "pairs.jsonl").read_text().splitlines()]
    rows[3] |= changes
    (data / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = training(tmp_path / "theirs", data / "pairs.jsonl")
    named = rf"(line 4|1\.png): {reason}"
    assert command(["check-data", *words[1:]]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(named, printed), printed
    assert command(words) == 2
    assert re.search(named, " ".join(capsys.readouterr().err.split()))
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").glob("*/*/checkpoints/*")]
