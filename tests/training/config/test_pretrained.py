"""Training from a Hugging Face folder: nothing of its sizes, tokenizer and preprocessing is typed."""

import json
from functools import partial

import hugging as hf
import pytest
import torch
from dual import saved_dual
from small import COMMON, TASKS
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    ViTConfig,
    ViTImageProcessor,
    ViTModel,
)

from vlm.checkpoint.hugging_face import describe_folder
from vlm.checkpoint.load import load_model, read
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.start import start_from
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.pretrained.folder import Folder
from vlm.models.pretrained.load import load_hugging_face
from vlm.tasks.captioning.predict import Captioner
from vlm.tasks.contrastive.predict import DualClassifier
from vlm.training.config.joined import JoinedModel
from vlm.training.config.pretrained import PretrainedModel
from vlm.training.run.fit import main

SHORT = ["trainer.max_steps=2", "test=false"]
STEPS = [*SHORT, "data.source.train_scenes=16", "data.source.val_scenes=4"]


def train_checkpoint(tmp_path, *overrides):
    """The checkpoint of a short run from the folder `theirs`."""
    folder = f"model.path={tmp_path / 'theirs'}"
    assert main([*COMMON, "model=pretrained", folder, *overrides, f"runs={tmp_path / 'runs'}"]) == 0
    return next((tmp_path / "runs").rglob("last.ckpt"))


def check_untouched(ours, before):
    """Asserts that a run without learning kept the weights of the folder."""
    for name, tensor in ours["state_dict"].items():
        assert tensor.equal(before["state_dict"][name][: len(tensor)]), name


FROZEN = ["optim.lr=0", "callbacks.ema=null"]
LARGER = "data.source.image_size=32"  # scenes have no less
FIRST, *REST = hf.CAPTIONERS


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize("name", [FIRST, *REST])
def test_a_captioner_is_fine_tuned_with_nothing_typed(tmp_path, capfd, name):
    place = tmp_path / "a folder, (of others)"
    hf.CAPTIONERS[name](place / "theirs", side=32)
    path = train_checkpoint(place, *STEPS, *FROZEN, "task.val_captions=2", "task.max_tokens=4", "data.max_len=16")
    assert "tensors loaded" in capfd.readouterr().out
    ours, before = read(path), read(place / "theirs")
    check_untouched(ours, before)
    assert ours["vlm"]["tokenizer"] == before["vlm"]["tokenizer"]
    assert ours["vlm"]["preprocess"] == before["vlm"]["preprocess"]
    assert Captioner(str(path)).tokenizer.eos_id == Captioner(str(place / "theirs")).tokenizer.eos_id


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_dual_encoder_is_fine_tuned_with_nothing_typed(tmp_path, name):
    folder = tmp_path / "theirs"
    saved_dual(name, folder)
    path = train_checkpoint(tmp_path, *STEPS, *FROZEN, LARGER)
    ours, before = read(path), read(folder)
    assert ours["vlm"]["task"] == "contrastive" and ours["state_dict"].keys() == before["state_dict"].keys()
    check_untouched(ours, before)
    images, texts = torch.rand(2, 3, 24, 24), ["a red circle", "two dogs run"]
    trained_one, theirs = DualClassifier(str(path)), DualClassifier(str(folder))
    assert torch.equal(trained_one.embed_texts(texts), theirs.embed_texts(texts))
    assert torch.equal(trained_one.model.embed_images(images), theirs.model.embed_images(images))


def start_of(path, folder):
    """Names of the weights of a run without learning that are the folder's."""
    model = load_model(read(path))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in model.state_dict().values():
        tensor.zero_()
    load_hugging_face(model, Folder(str(folder)))
    return {name for name, tensor in model.state_dict().items() if tensor.equal(before[name])}


def encoder_of(path):
    """Names of the weights of a checkpoint's encoder."""
    names = {name.removeprefix("model.") for name in read(path)["state_dict"]}
    return {name for name in names if name.startswith("encoder.")}


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize(
    ("name", "task"),
    [*zip(hf.ENCODERS, ["classification", "captioning"] * 3, strict=False), ("siglip", "classification")],
)
def test_an_encoder_of_images_is_trained_from(tmp_path, name, task):
    folder = tmp_path / "theirs"
    hf.save_parts(folder, hf.ENCODERS[name]())
    sizes = ["task.val_captions=2", "task.max_tokens=4"] if task == "captioning" else []
    path = train_checkpoint(tmp_path, f"task={task}", *STEPS, *FROZEN, *sizes, LARGER)
    assert encoder_of(path) <= start_of(path, folder)
    assert read(path)["vlm"]["preprocess"] == describe_folder(Folder(folder))[1]["preprocess"]


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("name", hf.CLASSIFIERS)
def test_a_classifier_is_fine_tuned(tmp_path, name):
    folder = tmp_path / "theirs"
    hf.save_parts(folder, hf.CLASSIFIERS[name]())
    path = train_checkpoint(tmp_path, *STEPS, *FROZEN, LARGER)
    assert read(path)["vlm"]["model"]["args"]["pool"] == read(folder)["vlm"]["model"]["args"]["pool"]
    assert encoder_of(path) <= start_of(path, folder)


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        *((BertModel, task) for task in ("tagging", "span_answering")),
        *((BertForMaskedLM, task) for task in ("text_classification", "masked_language_modeling")),
    ],
)
def test_bert_is_trained_from(tmp_path, task, kind):
    folder = tmp_path / "theirs"
    hf.saved_bert(folder, kind)
    own = [text for text in TASKS[task] if "model." not in text]
    path = train_checkpoint(tmp_path, f"task={task}", *own, *SHORT, *FROZEN)
    same = start_of(path, folder)
    assert encoder_of(path) <= same
    assert ("vocabulary_head.dense.weight" in same) == (task == "masked_language_modeling" and kind is BertForMaskedLM)


@pytest.mark.slow
def test_the_head_of_a_folder_is_taken_for_its_own_task(tmp_path):
    folder = tmp_path / "theirs"
    hf.saved_bert(folder, BertForSequenceClassification, **hf.LABELS)
    own = [text for text in TASKS["text_classification"] if "model." not in text]
    path = train_checkpoint(tmp_path, *own, *SHORT, *FROZEN)
    assert {"transform.weight", "encoder.norm1"} & start_of(path, folder) == {"transform.weight"}


def saved_vit(folder):
    hf.save_parts(folder, hf.ENCODERS["vit"]())


@pytest.mark.parametrize(
    ("save", "task", "words"),
    [
        (saved_vit, {}, "does not determine a task; choose task=captioning or task=class"),
        (
            saved_vit,
            {"task": "tagging"},
            "a ViTModel cannot be trained for task=tagging; choose task=captioning or task=cla",
        ),
        (lambda folder: hf.saved_bert(folder, BertModel), {}, "task=masked_language_modeling or task=text_class"),
        (
            hf.saved_captioner,
            {"task": "classification"},
            "for task=classification; choose task=captioning or task=image_questions or task=conversations or "
            "task=preferences$",
        ),
        (
            hf.saved_gpt2,
            {"task": "captioning"},
            "cannot be trained for task=captioning; choose task=language_modeling$",
        ),
    ],
    ids=["no task", "other inputs", "no task of texts", "half a captioner", "no encoder"],
)
def test_a_folder_is_refused_for_a_task_that_it_is_not_for(tmp_path, save, task, words):
    save(tmp_path / "theirs")
    with pytest.raises(UserError, match=words):
        PretrainedModel.overrides({"path": str(tmp_path / "theirs")}, task)


@pytest.mark.sample(plain=2, slow=2)
@pytest.mark.parametrize("task", ["image_questions", "conversations"])
@pytest.mark.parametrize(
    ("save", "words"),
    [
        (
            hf.saved_gpt2,
            "a GPT2LMHeadModel cannot be trained for task={}; choose task=language_modeling; for texts about",
        ),
        (partial(hf.saved_decoder, name="llama"), "a LlamaForCausalLM cannot be trained for task={}"),
    ],
    ids=["gpt2", "llama"],
)
def test_a_folder_that_cannot_answer_about_images_says_what_can(tmp_path, capsys, save, words, task):
    save(tmp_path / "theirs")
    assert vlm(["train", "model=pretrained", f"model.path={tmp_path / 'theirs'}", f"task={task}"]) == 2
    said = capsys.readouterr().err
    assert words.format(task) in said and "model=vision_language model.encoder.path=FOLDER" in said


@pytest.mark.sample(plain=1, slow=5)
@pytest.mark.parametrize("task", ["image_questions", "conversations"])
@pytest.mark.parametrize("name", ["vit_gpt2", "blip", "git"])
def test_a_captioner_learns_to_answer_questions(tmp_path, monkeypatch, name, task):
    hf.CAPTIONERS[name](tmp_path / "theirs")
    hf.photos(tmp_path / "photos", 4)
    names = sorted(path.name for path in (tmp_path / "photos").iterdir())
    rows = [
        {"image": name, "texts": [{"user": "what is it?", "assistant": f"a cat {n}"}]} for n, name in enumerate(names)
    ]
    rows = [row | {"split": "val" if n == 3 else "train"} for n, row in enumerate(rows)]
    (tmp_path / "photos" / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = [f"{name},what is it?,a cat {n},{'val' if n == 3 else 'train'}" for n, name in enumerate(names)]
    (tmp_path / "photos" / "questions.csv").write_text("\n".join(["image,question,answer,split", *columns]) + "\n")
    source, table = ("conversations", "chats.jsonl") if task == "conversations" else ("questions", "questions.csv")
    own = [f"data={source}", f"data.path={tmp_path / 'photos' / table}", "data.num_workers=0", "data.batch_size=3"]
    words = ["model=pretrained", f"model.path={tmp_path / 'theirs'}", f"task={task}", "trainer=cpu", "test=false"]
    monkeypatch.chdir(tmp_path)
    assert vlm(["train", *words, *own, "trainer.max_steps=2"]) == 0
    (path,) = (tmp_path / "runs").glob("*/*/checkpoints/last.ckpt")
    first, last = read(str(tmp_path / "theirs"))["state_dict"], read(str(path))["state_dict"]
    assert first.keys() == last.keys()
    assert not all(first[key].equal(last[key]) for key in first)


@pytest.mark.slow
def test_an_image_encoder_is_trained_for_questions(tmp_path):
    folder = tmp_path / "theirs"
    hf.save_parts(folder, (hf.vision(ViTModel, ViTConfig, image_size=32), ViTImageProcessor(size=hf.square(32))))
    own = [text for text in TASKS["image_questions"] if "model" not in text and "image_size" not in text]
    path = train_checkpoint(tmp_path, "task=image_questions", *own, *SHORT, *FROZEN)
    assert encoder_of(path) <= start_of(path, folder)


def test_a_siglip_without_its_tokenizer_is_an_image_encoder(tmp_path):
    folder = tmp_path / "theirs"
    saved_dual("siglip", folder)
    for name in ("spiece.model", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    for task in ("captioning", "classification"):
        given = PretrainedModel.overrides({"path": str(folder)}, {"task": task})
        assert "model/encoder=vit" in given and not any(text.startswith("tokenizer") for text in given)
    joined = {
        "encoder.path": str(folder),
        "encoder.name": None,
        "encoder.weights": None,
        "init_from": None,
        "chat_template": "auto",
    }
    hf.saved_decoder(tmp_path / "llama", "llama")
    given = JoinedModel.overrides(joined | {"decoder.path": str(tmp_path / "llama")}, {})
    assert f"model.encoder.backbone.init_from={folder}" in given
    with pytest.raises(UserError, match=r"there is no (tokenizer\.json|spiece\.model)"):
        PretrainedModel.overrides({"path": str(folder)}, {"task": "contrastive"})
    model = Classifier(
        encoder=rebuild(describe_folder(Folder(folder), images_only=True)[0].parts["encoder"]),
        num_classes=2,
        pool="mean",
    )
    assert any("tensors loaded" in line for line in start_from(model, {"": str(folder)}, tokenizer=None))


TEXTS = ["data.source.train_documents=10", "data.source.val_documents=3", "data.train_samples=16", "data.max_len=32"]


@pytest.mark.sample(slow=1)
@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma"])
def test_a_decoder_of_llamas_family_learns_by_adapters_and_goes_out_merged(tmp_path, name):
    theirs, _ = hf.saved_decoder(tmp_path / "theirs", name)
    path = train_checkpoint(tmp_path, "model/adapt=lora", *SHORT, *TEXTS)
    assert vlm(["export", str(tmp_path / "out"), "-c", str(path)]) == 0
    again = type(theirs).from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(len(theirs.get_input_embeddings().weight), (2, 20))
    ours = load_model(read(path))
    with torch.no_grad():
        logits = again(tokens).logits
        torch.testing.assert_close(ours.head(ours(tokens)), logits, rtol=0, atol=1e-4)
        assert (theirs(tokens).logits - logits).abs().max() > 1e-3  # they learnt


@pytest.mark.slow
def test_gpt2_is_fine_tuned_too(tmp_path):
    hf.saved_gpt2(tmp_path / "theirs")
    assert read(train_checkpoint(tmp_path, *SHORT, *TEXTS))["vlm"]["tokenizer"]["class"] == "BytePairTokenizer"


@pytest.mark.slow
def test_a_path_is_needed_and_is_of_that_model_alone(tmp_path):
    with pytest.raises(UserError, match=r"^model\.path: missing; give model\.path=FOLDER$"):
        compose(["model=pretrained"])
    with pytest.raises(UserError, match=r"^model\.path: unknown"):
        compose(["model.path=x"])
    with pytest.raises(UserError, match=r"model=tinny: unknown; choose from .*pretrained"):
        compose(["model=tinny"])


@pytest.mark.slow
def test_an_experiment_may_choose_a_folder(tmp_path):
    hf.saved_bert(tmp_path / "theirs", BertModel)
    (tmp_path / "conf/experiment").mkdir(parents=True)
    text = "# @package _global_\ndefaults: [override /task: tagging, override /model: pretrained]\n"
    own = f"path: {tmp_path / 'theirs'}, size: {{dropout: 0.4}}, encoder: {{embed_norm: false, token_dropout: 0.2}}"
    text += f"model: {{{own}}}\noptim: {{lr: 0.5}}\n"
    (tmp_path / "conf/experiment/mine.yaml").write_text(text)
    folder = f"hydra.searchpath=[file://{tmp_path / 'conf'}]"
    config = compose([folder, "experiment=mine", "model.encoder.token_dropout=0.3"])
    assert (config["task_name"], config["optim"]["lr"]) == ("tagging", 0.5)
    assert config["model"]["init_from"] == config["tokenizer"]["path"] == str(tmp_path / "theirs")
    sizes, encoder = config["model"]["size"], config["model"]["encoder"]
    plain = compose(["model=pretrained", f"model.path={tmp_path / 'theirs'}", "task=tagging"])
    usual = plain["model"]["size"]
    assert sizes["dropout"] == 0.4 != usual["dropout"] and sizes["dim"] == usual["dim"]
    assert not encoder["embed_norm"] and encoder["token_dropout"] == 0.3  # the folder's, the experiment's, the user's


@pytest.mark.slow
def test_an_experiment_keeps_its_values_for_an_encoder_that_its_task_chooses(tmp_path):
    """task=image_questions chooses an encoder, whose place the folder's takes."""
    hf.save_parts(tmp_path / "theirs", next(iter(hf.ENCODERS.values()))())
    (tmp_path / "conf/experiment").mkdir(parents=True)
    file = tmp_path / "conf/experiment/mine.yaml"
    head = "# @package _global_\ndefaults: [override /task: image_questions, override /model: pretrained]\n"
    given = [f"hydra.searchpath=[file://{tmp_path / 'conf'}]", "experiment=mine", f"model.path={tmp_path / 'theirs'}"]
    file.write_text(head + "model: {encoder: {norm_eps: 0.5, drop_path: 0.25}}\n")
    encoder = compose(given)["model"]["encoder"]
    assert (encoder["norm_eps"], encoder["drop_path"]) == (0.5, 0.25)
    plain = compose([*given[2:], "model=pretrained", "task=image_questions"])["model"]["encoder"]
    assert encoder == plain | {"norm_eps": 0.5, "drop_path": 0.25} and plain["norm_eps"] != 0.5
    assert compose([*given, "model.encoder.norm_eps=0.125"])["model"]["encoder"]["norm_eps"] == 0.125
    file.write_text(head + "model: {encoder: {depth_of_field: 2}}\n")
    with pytest.raises(UserError, match=r"^model\.encoder\.depth_of_field: unknown"):
        compose(given)


@pytest.mark.sample(slow=3)
@pytest.mark.parametrize(
    ("own", "rate"), [([], "5e-5"), (["model/adapt=lora"], "2e-4"), (["optim.lr=1e-3"], "1e-3"), (["optim=muon"], None)]
)
def test_weights_that_were_trained_move_slowly_unless_a_rate_is_typed(tmp_path, own, rate):
    hf.CAPTIONERS[FIRST](tmp_path / "theirs")
    config = compose(["model=pretrained", f"model.path={tmp_path / 'theirs'}", *own])
    assert ("AdamW" in config["optim"]["_target_"]) == (rate is not None)
    assert rate is None or config["optim"]["lr"] == float(rate)


def test_a_decoder_that_starts_fresh_learns_faster_than_what_was_trained(tmp_path):
    hf.save_parts(tmp_path / "theirs", next(iter(hf.ENCODERS.values()))())
    folder = str(tmp_path / "theirs")
    assert "optim.lr=3e-4" in PretrainedModel.overrides({"path": folder}, {"task": "captioning"})
    assert "optim.lr=5e-5" in PretrainedModel.overrides({"path": folder}, {"task": "classification"})
