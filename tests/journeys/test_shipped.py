"""Every config that is shipped, and every command of the README and of the pages on tasks."""

import io
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import hugging
import pytest
from chats import saved_chat
from documented import COMMANDS, README
from dual import saved_dual
from easy_vqa_data import draw_easy_vqa
from flickr import draw_flickr8k, translate_flickr8k
from gguf_files import decoder, save_gguf
from image_text import saved_image_text
from journey import draw_classes
from llama_cpp_models import save_pair
from PIL import Image
from small import TASKS as SMALL
from tiny_checkpoints import STORY
from torch import nn
from transformers import BertModel
from translators import saved_marian, saved_t5

import vlm as vlm_api
from vlm.cli.main import run as vlm
from vlm.config.compose import compose
from vlm.training.config.check import check
from vlm.training.config.nodes import check_fit
from vlm.training.run.fit import main

ROOT = Path(__file__).parents[2]
ANOTHER_NAME = "text_to_text"  # of translation
TASKS = sorted({path.stem for path in (ROOT / "conf" / "task").glob("*.yaml")} - {ANOTHER_NAME})
EXPERIMENTS = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
# Each group with the tasks that its options are tried with.
GROUPS = {
    **dict.fromkeys(("model", "data"), ()),
    "model/encoder": ("captioning", "classification"),
    "model/encoder/spelling": ("tagging", "span_answering"),
    "model/decoder": ("captioning", "translation"),
    "model/position": ("captioning", "language_modeling", "tagging"),
    "tokenizer": ("captioning", "language_modeling"),
    **dict.fromkeys(("optim", "debug"), TASKS),
    **dict.fromkeys(("model/fusion", "schedule", "trainer", "logger", "callbacks"), ("captioning",)),
}
# Options that are for one task alone; those of `model` and `data` that are not named here are for captioning.
OWN = {
    "classification": "classifier_.*|image_folder|image_tar|image_table|.*_classes|cifar10|fashion_mnist|mnist",
    "contrastive": "dual_.*|shapes_retrieval",
    "conversations": "conversations|mix|shapes_conversations|shapes_grounding",
    "detection": "boxes|coco_boxes|shapes_boxes",
    "image_questions": "questions|easy_vqa|shapes_questions|shapes_differences",
    "language_modeling": "lm_.*|lstm|neural_lm|gpt2|text|shapes_text",
    "text_classification": "text_classifier_.*|shapes_pairs|texts|text_folder|sst2",
    "tagging": "tagger_.*|shapes_roles|shapes_words|conll|conllu",
    "translation": "translator_.*|seq2seq|bahdanau|aligned|translations|multi30k"
    "|shapes_translation|shapes_spelling|shapes_summaries",
    "text_to_image": "drawer_.*",
    "preferences": "preferences|shapes_preferences",
    "photo_translation": "photo_translator_.*|shapes_photo_translation|multi30k_photos",
    "masked_language_modeling": "masked_lm_.*|shapes_masked|joined_texts",
    "span_answering": "span_answerer_.*|shapes_stories|squad",
}
# Options with which options of other groups do not go.
APART = {"model": "neural_lm|lstm|seq2seq|bahdanau|show_attend_tell|tagger_words", "model/decoder": ".*"}
# Read folders, or stand beside an encoder of images: test_pretrained.py, test_two_folders.py.
OF_A_FOLDER = ("model=pretrained", "model=vision_language", "model/encoder=causal_text")
ENCODERS_OF_TEXT = ("text_classification", "tagging", "translation", "photo_translation")
ENCODERS_OF_TEXT += ("span_answering", "masked_language_modeling")
# What a data set cannot do without: where it is, or patches that divide its images.
PATHS = {"image_tar": "classes.tar", "image_table": "classes.csv", "texts": "texts.csv", "conll": "tags.tsv"}
PATHS |= {"conllu": "tags.conllu", "squad": "questions.json", "translations": "translations.csv"}
ROOTS = ("captions", "image_folder", "text_folder", "sst2", "multi30k", "easy_vqa")
NEEDS = {
    **{key: ["data.root=."] for key in ROOTS},
    **{name: [f"data.path={path}"] for name, path in PATHS.items()},
    **{key: ["model.encoder.patch_size=4"] for key in ("fashion_mnist", "mnist")},
    "questions": ["data.root=.", "data.path=questions.csv"],
    "boxes": ["data.root=.", "data.path=boxes.csv"],
    "conversations": ["data.root=.", "data.path=chats.jsonl"],
    "mix": ["data.mix=[{path: chats.jsonl, root: ., weight: 1}, {path: chats.jsonl, root: ., weight: 1}]"],
    "preferences": ["data.root=.", "data.path=pairs.jsonl"],
    "joined_texts": ["data.source.sources=[{_target_:vlm.data.sources.class_folders.TextFolders,root:.}]"],
    "aligned": ["data.root=.", "data.from=en", "data.to=de"],
    "multi30k_photos": ["data.root=.", "data.photos=."],
    "pretrained": ["tokenizer.path=."],
}


def tasks_of(group: str, option: str) -> list[str]:
    if group == "model/encoder" and option.startswith(("text", "recurrent", "one_text")):
        return list(ENCODERS_OF_TEXT)
    if option == "image_tokens":
        return ["text_to_image"]
    if GROUPS[group]:
        return list(GROUPS[group])
    return [next((task for task, names in OWN.items() if re.fullmatch(names, option)), "captioning")]


def options_of(task: str) -> Iterator[list[str]]:
    """Every option of a task in a few configs: the first of all groups together, the second, and so on."""
    together = []
    for group in GROUPS:
        options = [path.stem for path in sorted((ROOT / "conf" / group).glob("*.yaml"))]
        options = [option for option in options if f"{group}={option}" not in OF_A_FOLDER]
        options = [option for option in options if task in tasks_of(group, option)]
        alone = [option for option in options if group in ("data", "tokenizer") and option in NEEDS]
        alone += [option for option in options if re.fullmatch(APART.get(group, ""), option)]
        yield from ([f"task={task}", f"{group}={option}", *NEEDS.get(option, [])] for option in alone)
        together.append([f"{group}={option}" for option in options if option not in alone])
    yield from ([f"task={task}", *filter(None, row)] for row in zip_longest(*together))


OPTIONS = [options for task in TASKS for options in options_of(task)]
CAPTIONERS = {"captioning", "captioning_flickr8k"}
TINY = ROOT / "tests" / "checkpoint" / "files"  # a small checkpoint a task


def write_squad(path: Path, story: str) -> None:
    """Questions about passages in SQuAD's layout."""
    asked = {"question": "what?", "answers": [{"text": "small", "answer_start": story.index("small")}]}
    passages = [{"context": f"{story} {path.stem} {n}", "qas": [{"id": f"{n}", **asked}]} for n in range(40)]
    path.write_text(json.dumps({"data": [{"paragraphs": passages}]}))


def draw_texts(folder: Path) -> None:
    """A few samples in the files of all data sets of texts."""
    words = ((1, "It", "PRON"), (2, "ran", "VERB"))
    tree = "".join(f"{n}\t{word}\t_\t{tag}" + "\t_" * 6 + "\n" for n, word, tag in words)
    for name in ("en_ewt", "fr_sequoia"):
        for split in ("train", "dev", "test"):
            (folder / f"{name}-ud-{split}.conllu").write_text(f"{tree}\n" * 20)
    for name in ("wnut17train.conll", "emerging.dev.conll", "emerging.test.annotated"):
        (folder / name).write_text("In\tO\nRome\tB-location\n\n" * 20)
    for split in ("train", "dev", "test"):
        lines = [f"{n % 2} a {'fine' if n % 2 else 'dull'} film of {split} {n}\n" for n in range(40)]
        (folder / f"stsa.binary.{split}").write_text("".join(lines))
    (folder / "train_phrases.tsv").write_text("sentence\tlabel\na film \t1\n")
    shutil.copytree(folder, folder / "sst2", ignore=shutil.ignore_patterns("*.conll*", "*.annotated"))
    shifts = [f"squadshifts/{name}_v1.0.json" for name in ("new_wiki", "reddit", "amazon_reviews")]
    for name in (*shifts, "xquad/xquad.en.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        write_squad(folder / name, STORY)
    for name in ("pos", "neg"):
        (folder / "movie_reviews" / name).mkdir(parents=True)
        for n in range(850, 1000):
            (folder / "movie_reviews" / name / f"cv{n:03d}.txt").write_text(f"a {name} film , number {n} .\n")
    for split in ("train", "val", "test"):
        (folder / "books" / split).mkdir(parents=True)
        (folder / "books" / split / "novel.txt").write_text(f"{STORY} That is the {split}'s.\n" * 40)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small data sets in the layouts of published ones: scenes for photos, a few texts."""
    root = tmp_path_factory.mktemp("drawn")
    for name in ("flickr8k", "pairs", "texts", "tinyshakespeare"):
        (root / name).mkdir()
    translate_flickr8k(draw_flickr8k(root / "flickr8k"), root / "flickr8k")
    draw_classes(root / "flowers", {"daisy": (240, 240, 230), "rose": (200, 20, 60), "tulip": (230, 160, 40)}, count=8)
    with tarfile.open(root / "cifar10.tar", "w") as archive:
        for split in ("train", "test"):
            archive.add(root / "flowers", arcname=split)
    lines = "ROMEO:\nBut, soft! what light through yonder window breaks?\n\n" * 60
    (root / "tinyshakespeare" / "input.txt").write_text(lines)
    for stem in (
        "train",
        "val",
        "test",
        "test_2016_flickr",
    ):  # aligned files, Multi30k's and names of photos among them
        (root / "pairs" / f"{stem}.images.txt").write_text("".join(f"train{n % 12}.jpg\n" for n in range(60)))
        for ending, words in (("en", "a red circle"), ("de", "ein roter Kreis")):
            lines = "".join(f"{words} of train, val or test: {stem} {n}\n" for n in range(60))
            (root / "pairs" / f"{stem}.{ending}").write_text(lines)
    draw_texts(root / "texts")
    draw_easy_vqa(root / "easy_vqa", images=130)  # the first 100 are held out of conversations
    return root


@pytest.mark.sample(slow=52)
@pytest.mark.parametrize("overrides", [[], *([f"task={task}"] for task in TASKS), *OPTIONS], ids=" ".join)
def test_every_option_composes_and_passes_the_check(overrides: list[str]) -> None:
    config = compose(overrides)
    check(config)
    check_fit(config)


def test_no_option_and_no_command_is_left_out() -> None:
    assert len(COMMANDS) >= 20
    tried = {override for options in OPTIONS for override in options}
    files = [path for group in GROUPS for path in (ROOT / "conf" / group).glob("*.yaml")]
    assert {f"{path.parent.relative_to(ROOT / 'conf')}={path.stem}" for path in files} - {*OF_A_FOLDER} <= tried


@pytest.mark.sample(plain=1, slow=2)
@pytest.mark.parametrize("task", TASKS)
def test_an_override_of_a_task_counts(task: str) -> None:
    assert compose([f"task={task}", "optim.lr=0.5", "trainer.max_epochs=3"])["optim"]["lr"] == 0.5


# Of a language model, so that its evaluation is short too.
SHORT = ["task.sampled_batches=2", "task.prompt_tokens=4"]


# Experiments that start from a run of another one.
AFTER = {"tagging_wnut17": "tagging_ewt", "text_classification_sst2_film": "masked_lm_film"}
AFTER |= {f"captioning_flickr8k{kind}_cider": f"captioning_flickr8k{kind}" for kind in ("", "_pretrained")}
AFTER["tagging_wnut17_bert"] = "tagging_ewt_bert"


FLICKR8K = "data.root=flickr8k"
BERT_SIZES = ["model.size.dim=24", "model.size.num_heads=3", "model.text_encoder.depth=2"]
# What an experiment reads, by the beginning of its name.
DATA = {
    "captioning_flickr8k_gpu": [FLICKR8K, "model.size.encoder_depth=2", "model.size.decoder_depth=2"],
    "captioning_flickr8k_languages": [FLICKR8K, "data.languages_root=flickr8k"],
    "contrastive_flickr8k_minilm": [FLICKR8K, *BERT_SIZES],
    **{key: [FLICKR8K] for key in ("captioning_flickr8k", "contrastive_flickr8k")},
    "detection_cpu": [],
    "drawn_lines": [],
    "text_to_image_cpu": [],
    "conversations_photos": ["data.root=.", "data.epoch_size=20"],
    "easy_vqa": ["data.root=easy_vqa"],
    "flowers": ["data.root=flowers"],
    "tagging_small": ["data.path=texts/en_ewt-ud-train.conllu"],
    **{key: ["data.root=texts"] for key in ("tagging", "text_classification", "span", "masked_lm_film")},
    "books": ["data.root=texts/books", *SHORT],
    "multi30k_photos": ["data.root=pairs", "data.photos=flickr8k/images"],
    "translation_multi30k": ["data.root=pairs"],
    "cifar10": ["data.path=cifar10.tar"],
    "shakespeare_gpu": ["data.path=tinyshakespeare/input.txt", *SHORT, "model.size.depth=2"],
    "shakespeare": ["data.path=tinyshakespeare/input.txt", *SHORT],
}


LAST = [experiment for experiment in EXPERIMENTS if experiment not in AFTER.values()]  # the others run before these


@pytest.mark.sample(slow=12)
@pytest.mark.parametrize("experiment", LAST)
def test_every_experiment_takes_a_step(experiment, drawn, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(drawn)
    fast = ["debug=fast", "trainer.accelerator=cpu", f"runs={tmp_path}"]
    fast += [f"trainer.limit_{part}_batches=1" for part in ("train", "val", "test")]
    start: list[str] = []
    for name in filter(None, (AFTER.get(experiment), experiment)):
        header = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text()
        assert re.search(rf"^#   python train\.py (task=\w+ )?experiment={name}( |$)", header, re.MULTILINE)
        own = next(given for known, given in DATA.items() if name.startswith(known))
        if name.endswith(("_bert", "_minilm")):
            if not start:
                hugging.saved_bert(tmp_path / "bert", BertModel)
            key = "model.path" if name.endswith("_bert") else "model.text_encoder.init_from"
            own = [*own, f"{key}={tmp_path / 'bert'}", "data.max_len=64"]
        if name == "conversations_photos":
            subprocess.run([sys.executable, str(ROOT / "docs" / "photo_chats.py"), "."], check=True)
        if name in ("captioning_flickr8k_smollm2", "conversations_photos"):
            save_gguf(tmp_path / "decoder.gguf", *decoder("tied"))
            own = [*own, f"model.decoder.path={tmp_path / 'decoder.gguf'}"]
        assert main([f"experiment={name}", *fast, *own, *start]) == 0
        part = "model" if name.startswith("captioning") else "model.encoder"
        start = [f"{part}.init_from={next(tmp_path.glob(f'{name}/*'))}"]
        if name == "captioning_flickr8k":  # whose stem Hugging Face's ViT does not have
            assert main([f"experiment={name}", *fast, *own, "model/encoder=vit", "name=plain"]) == 0
            path = next(tmp_path.glob("plain/*/checkpoints/best.ckpt"))
            assert vlm(["export", str(tmp_path / "out"), "-c", str(path), "--to", "huggingface"]) == 0


@pytest.fixture
def place(trained, photos, drawn, tmp_path, monkeypatch) -> Path:
    """A folder with the data that the README's commands name, in which they run."""
    for name in CAPTIONERS:
        shutil.copytree(trained, tmp_path / "runs" / name / "DATE_TIME")
    shutil.copytree(ROOT / "data" / "sample", tmp_path / "data" / "sample")
    for name in ("flickr8k", "flowers", "tinyshakespeare"):
        shutil.copytree(drawn / name, tmp_path / "data" / name)
    shutil.copytree(drawn / "flickr8k", tmp_path / "data" / "flickr8k_languages")
    shutil.copy(drawn / "cifar10.tar", tmp_path / "data")
    shutil.copytree(drawn / "pairs", tmp_path / "pairs")
    shutil.copytree(photos, tmp_path / "photos")
    content = json.loads((photos / "captions.json").read_text())
    names = {image["id"]: image["file_name"] for image in content["images"]}
    captions = [(names[note["image_id"]], note["caption"]) for note in content["annotations"]]
    table = "".join(f'{name},"{caption}"\n' for name, caption in captions)
    (tmp_path / "photos" / "captions.csv").write_text(f"image,caption\n{table}")
    (tmp_path / "notes.txt").write_text(STORY)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), re.DOTALL)
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))  # a user's own module
    for name in ("train", "test"):
        write_squad(tmp_path / f"{name}.json", STORY)
    (tmp_path / "my_photos").mkdir()
    for name, caption in captions:
        shutil.copy(photos / name, tmp_path / "my_photos")
        (tmp_path / "my_photos" / name).with_suffix(".txt").write_text(f"{caption}\n")
    rows = "".join(f"{name},what is it?,{caption}\n" for name, caption in captions)
    (tmp_path / "questions.csv").write_text(f"image,question,answer\n{rows}")
    turns = [{"image": name, "texts": [{"user": "what is it?", "assistant": caption}]} for name, caption in captions]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    shutil.copy(drawn / "pairs" / "test.en", tmp_path / "letters.txt")
    shutil.copy(drawn / "flickr8k" / "images" / "test0.jpg", tmp_path / "photo.jpg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ROMEO:\n"))
    return tmp_path


def drawn_samples(command: str) -> list[str]:
    """Few samples of the data that a command's task draws."""
    task = re.search(r"task=(text_classification|tagging|span_answering|masked_language_modeling)", command)
    if task:
        return [option for option in SMALL[task[1]] if option.startswith("data.source.")]
    return [f"data.source.{split}_scenes=40" for split in ("train", "val", "test")]


@pytest.mark.slow
def test_the_lines_of_python_run_as_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's section "From Python", with a training that is made short."""
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code.splitlines()) > 8
    train, shown = vlm_api.train, []
    small = ["debug=fast", "trainer.accelerator=cpu", "model.size.dim=32", "model.size.num_heads=2"]
    monkeypatch.setattr(vlm_api, "train", lambda *overrides, **more: train(*overrides, *small, **more), raising=False)
    monkeypatch.setattr(Image.Image, "show", lambda self: shown.append(self.size))
    values: dict = {}
    exec(code, values)
    assert len(values["captions"]) == 7 and {len(texts) for texts in values["captions"]} == {3}
    assert shown and values["run"].best.is_file() and isinstance(values["module"], nn.Module)


@pytest.fixture(scope="module")
def trained_joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a projector between two small random folders, by conversations about scenes."""
    folder = tmp_path_factory.mktemp("joined")
    hugging.save_parts(folder / "encoder", hugging.ENCODERS["siglip"]())
    save_gguf(folder / "decoder.gguf", *decoder("tied"))
    parts = [f"model.encoder.path={folder / 'encoder'}", f"model.decoder.path={folder / 'decoder.gguf'}"]
    scenes = [f"data.source.{split}_scenes=8" for split in ("train", "val", "test")]
    small = ["debug=fast", "trainer=cpu", "data.source.image_size=32", "data.max_len=96", *scenes]
    assert main(["task=conversations", "model=vision_language", *parts, *small, f"runs={folder / 'runs'}"]) == 0
    return next((folder / "runs").glob("*/20*"))


# Folders of Hugging Face, GGUF files, and data that they are trained on.
FOLDERS = {
    "FOLDER": lambda folder: hugging.saved_captioner(folder, side=32),  # the least of a drawn scene
    "bert-base-uncased": lambda folder: hugging.saved_bert(folder, BertModel),
    "clip-vit-base-patch32": lambda folder: saved_dual("clip", folder),
    "siglip-base-patch16-224": lambda folder: hugging.save_parts(folder, hugging.ENCODERS["siglip"]()),
    "dinov2-small": lambda folder: hugging.save_parts(folder, hugging.ENCODERS["dinov2"]()),
    "opus-mt-en-de": lambda folder: saved_marian(folder),
    "t5-small": lambda folder: saved_t5(folder),
    "trocr-base-handwritten": lambda folder: hugging.saved_trocr(folder),
    "scans": lambda folder: hugging.photos(folder),
    "paligemma-3b": lambda folder: saved_image_text(folder, "paligemma"),
    "SmolVLM-256M-Instruct": lambda folder: saved_image_text(folder, "smolvlm"),
    "SmolLM2-135M-Instruct": lambda folder: saved_chat(folder, "chatml"),
    "smollm2.gguf": lambda path: save_gguf(path, *decoder("tied")),
    "smolvlm.gguf": lambda path: save_pair(path),
    "book.txt": lambda path: path.write_text("\n".join(hugging.TEXTS * 20)),
    "birds": lambda folder: draw_classes(folder, {"wren": (200, 90, 40), "tit": (60, 90, 200)}, count=20),
    "train.conll": lambda path: path.write_text("a\tDET\nwren\tNOUN\n\n" * 40),
}


# Fixtures whose runs stand for those that the pages name; tiny checkpoints stand for the others.
RUNS = {"conversations": "trained_joined", "shakespeare_cpu": "trained_text"}
RUNS |= dict.fromkeys(("classification", "flowers"), "trained_classifier")


@pytest.mark.sample(plain=2, slow=25)
@pytest.mark.parametrize("command", sorted(COMMANDS, key=lambda command: command not in README))
def test_the_commands_of_the_pages_run_as_written(command, place, request, monkeypatch) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "python" or arguments[0] == "train":  # vlm train is python train.py
        program, arguments = "python", arguments[1:]
    for name in set(re.findall(r"runs/(\w+)/DATE_TIME", command)) - CAPTIONERS:
        run = place / "runs" / name / "DATE_TIME"
        if name in RUNS:
            shutil.copytree(request.getfixturevalue(RUNS[name]), run)
        else:
            (run / "checkpoints").mkdir(parents=True)
            shutil.copy(TINY / f"{name}.ckpt", run / "checkpoints" / "best.ckpt")
    if "data=webdataset" in command or command.startswith("vlm caption 'data/shards"):
        assert vlm(["shard", "data=flickr8k", "data.root=data/flickr8k", "--out", "data/shards"]) == 0
    for name, save in FOLDERS.items():
        if name in command:
            save(place / name)
    if "--to onnx" in command:
        pytest.importorskip("onnxscript")
    wrong = "dpeth" in command
    if program == "vlm" and arguments[0] in ("serve", "demo"):
        server = pytest.importorskip("uvicorn").Server
        pytest.importorskip("gradio" if arguments[0] == "demo" else "fastapi")
        monkeypatch.setattr(server, "run", lambda self, sockets: signal.raise_signal(signal.SIGTERM))
        assert vlm(arguments) == 128 + signal.SIGTERM
    elif program == "vlm":
        assert vlm(arguments) == 0
    elif any(argument.startswith("resume=") for argument in arguments):
        assert main([argument.replace("max_epochs=10", "max_epochs=3") for argument in arguments]) == 0  # in less time
    else:
        small = ["debug=fast", "trainer.max_epochs=1", "trainer.accelerator=cpu"]
        if "model=pretrained" in command:
            small += [] if re.search("task=classification|paligemma", command) else ["data.max_len=32"]
        elif "model=vision_language" in command:
            small += ["data.max_len=96"]
        elif re.search(r"init_from=runs/(image_questions|detection)/", command):
            small += ["model.size.dim=16", "model.size.num_heads=2", "model/encoder=vit", "model.encoder.patch_size=8"]
            small += ["data.image_size=32"]
        else:
            small += ["model.size.dim=32", "model.size.num_heads=2"]
        small += SHORT if "task=language_modeling" in command or "shakespeare" in command else []
        small += [] if re.search("data=|experiment=", command) else drawn_samples(command)
        assert main([*arguments, *small]) == (2 if wrong else 0)
