"""What a user gets wrong, and what they are told."""

import re
from contextlib import suppress

import pytest
import transformers
from hugging import saved_bert

from vlm.cli.main import run
from vlm.config.compose import compose
from vlm.config.tree import Config
from vlm.errors import UserError
from vlm.training.config.check import check
from vlm.training.config.nodes import check_fit
from vlm.training.run.fit import main

# What a message about unfit data names: options of data for the task, and tasks for the data.
FITTING = [
    ("captioning", "image_table", ["data=captions", "data=coco", "data=drawn_lines"], ["task=classification"]),
    ("image_questions", "captions", ["data=questions"], ["task=captioning", "task=contrastive"]),
    ("conversations", "text", ["data=questions", "data=conversations"], ["task=language_modeling"]),
    ("tagging", "texts", ["data=conll"], ["task=masked_language_modeling", "task=text_classification"]),
    ("language_modeling", "squad", ["data=text"], ["task=span_answering"]),
]


def refuse_unfit(config: Config, **options: bool) -> None:
    """Fails if data and task do not fit, whatever else is wrong."""
    try:
        check_fit(config)
    except UserError as error:
        pytest.fail(str(error))


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize(("task", "data", "fitting_data", "fitting_tasks"), FITTING)
def test_data_and_tasks_that_fit_are_named(task, data, fitting_data, fitting_tasks) -> None:
    """Each option that the message names is one with which data and task fit."""
    with pytest.raises(UserError) as error:
        compose([f"task={task}", f"data={data}", "data.path=x"], check)
    named = re.findall(r"((?:data|task)=\w+)", str(error.value).rpartition("; choose ")[2])
    assert {*fitting_data, *fitting_tasks} <= {*named} and len(named) <= 6
    for group, _, name in (option.partition("=") for option in named):
        chosen = {"task": task, "data": data, group: name}
        with suppress(UserError):  # not every option has a path and a root
            compose([*(f"{key}={value}" for key, value in chosen.items()), "data.path=x", "data.root=x"], refuse_unfit)


@pytest.mark.slow
def test_keys_that_a_pretrained_model_sets_are_not_blamed_on_the_user(tmp_path, capsys) -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    transformers.ViTForImageClassification(vit).save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    capsys.readouterr()  # a progress bar
    options = ["model=pretrained", f"model.path={tmp_path}", "data=texts", "data.path=x"]
    lacks = "data=texts: has no image_size, which model=pretrained sets; choose another option of data"
    assert main(options) == 2 and capsys.readouterr().err.startswith(f"error: {lacks}")
    assert main([*options, "data.image_size=16"]) == 2 and "data.image_size: unknown" in capsys.readouterr().err
    # Faults of what the user typed are all reported, as without a folder.
    assert main([*options[:2], "task=classification", "optim=adamww", "seed=1,2"]) == 2
    said = capsys.readouterr().err
    assert "optim=adamww: unknown" in said and "did you mean adamw" in said and "seed=1,2" in said, said


@pytest.mark.slow
def test_the_key_that_names_the_folder_of_initial_weights_is_named(tmp_path, capsys) -> None:
    saved_bert(tmp_path / "bert", transformers.BertForSequenceClassification)  # of 64 positions
    (tmp_path / "t.csv").write_text("text,label\n" + "a dog,a\na cat,b\n" * 20)
    options = ["task=text_classification", "data=texts", f"data.path={tmp_path / 't.csv'}", "data.max_len=128"]
    options += ["model=pretrained", f"model.path={tmp_path / 'bert'}", "trainer=cpu", f"runs={tmp_path / 'runs'}"]
    assert main(options) == 2
    assert f"model.path: encoder.max_len is 128, {tmp_path / 'bert'} has 64; set data.max_len=64" in (
        capsys.readouterr().err.replace("\n  ", " ")
    )


@pytest.mark.parametrize("command", ["train", "check-data"])
def test_the_name_of_an_option_alone_is_completed(command, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([command, "captions"]) == 2 and "write data=captions" in capsys.readouterr().err
    assert run([command, "conversations"]) == 2
    assert "write data=conversations or task=conversations" in capsys.readouterr().err
