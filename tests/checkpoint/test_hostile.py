"""Files and folders that are cut, wrong or made to do harm, as one table: who makes each, and words of its refusal.

Each is refused in one line, in under 5 s and 1 GB; nothing is executed or fetched. Random changes are read or refused.
"""

import json
import random
import re
import shutil
import socket
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import hostile_files as files
import hostile_folders as folders
import hostile_gguf as gguf
import pytest
import tiny_checkpoints as tiny
import torch
from gguf_files import decoder, save_gguf
from mutations import change, is_read
from torch import nn

from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run as vlm
from vlm.errors import UserError
from vlm.training.run import evaluate, run  # noqa: F401  imported before the clock runs
from vlm.training.run.fit import main as train

# Checkpoints


def graphs_folder(path: Path) -> None:
    path.mkdir()
    (path / "graphs.json").write_text("{}")


def zip_file(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "weights")


def stating(key: str, value: Any) -> Callable[[Path], None]:
    """Writes a checkpoint with a value that is only stated."""

    def make(path: Path) -> None:
        checkpoint = files.good()
        *parents, name = key.split(".")
        node = checkpoint["vlm"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
        write(path, checkpoint)

    return make


FOREIGN = {
    "text": (lambda path: path.write_text("weights\n" * 100), "is not a checkpoint"),
    "zip": (zip_file, "not a checkpoint of vlm"),
    "state dict": (lambda path: torch.save(nn.Linear(2, 2).state_dict(), path), "was not written by vlm"),
    "tensor": (lambda path: torch.save(torch.zeros(3), path), "was not written by vlm"),
    "call": (files.CHECKPOINTS["pickle of os.system"], "is damaged or not a checkpoint of vlm"),
    "module": (lambda path: torch.save(nn.Linear(2, 2), path), "not a checkpoint of vlm"),
    "legacy": (lambda path: torch.save({"format": 1}, path, _use_new_zipfile_serialization=False), "not a checkpoint"),
    "format": (
        lambda path: torch.save({"format": 1, "vlm": {}}, path),
        "has format 1, .* reads format 2; .*train again",
    ),
    "folder": (lambda path: path.mkdir(), "it has neither config.json .* nor checkpoints/"),
    "stopped run": (lambda path: (path / "checkpoints").mkdir(parents=True), "neither best.ckpt nor last.ckpt"),
    "graphs": (graphs_folder, "holds graphs for other programs; give the checkpoint"),
    "nothing": (lambda path: None, "no such checkpoint"),
}
STATED = [
    ("model.args.encoder.args.image_size", 96000),
    ("preprocess.image_size", 96000),
    ("preprocess.image_size", [64, 96000]),
    ("max_tokens", -1),
    ("model.args.decoder.args.depth", 10**7),
    ("model.args.decoder.args.max_len", -1),
    ("config.model.encoder.image_size", 96000),
    ("config.data.num_workers", 10**6),
    ("config.task.max_tokens", -1),
    ("config.model.decoder.depth", 10**7),
    ("config.model.decoder.max_len", -1),
    ("config.data.max_len", -1),
    ("config.trainer.devices", 10**6),
    ("decoding.beam", 10**6),
    ("decoding.results", 10**6),
    ("config.data.source.test_scenes", 10**12),
]

# The table


def rows() -> Iterator[tuple[str, str, Callable[[Path, Path], Any], str]]:
    """What is wrong, the name of the file, who makes it, given a folder of good ones, and words of the refusal."""
    for what, (make, words) in FOREIGN.items():
        yield f"checkpoint: {what}", "model.ckpt", lambda path, good, make=make: make(path), words
    for key, value in STATED:
        words = re.escape(f"{key}: {value} is out of bounds")
        yield f"checkpoint: {key}={value}", "x.ckpt", lambda path, good, at=(key, value): stating(*at)(path), words
    for number, (name, what, spoil, words) in enumerate(folders.rows()):

        def copy(path: Path, good: Path, name: str = name, spoil: Callable = spoil) -> None:
            spoil(Path(shutil.copytree(good / name, path)))

        yield f"{name}: {what} {number}", "theirs", copy, words
    for what, (make, words) in gguf.RAW.items():
        yield f"gguf: {what}", "a.gguf", lambda path, good, make=make: path.write_bytes(make()), words
    for what, (values, words) in gguf.VALUES.items():

        def save(path: Path, good: Path, values: dict[str, Any] = values) -> None:
            save_gguf(path, *decoder("tied"), values=values, kind="Q8_0")

        yield f"gguf: {what}", "a.gguf", save, words
    for what, (spoil, words) in gguf.CHANGES.items():

        def edit(path: Path, good: Path, spoil: Callable = spoil) -> None:
            path.write_bytes(spoil((good / "a.gguf").read_bytes()))

        yield f"gguf: {what}", "a.gguf", edit, words
    for key, (value, words) in gguf.PARTS.items():
        name = "a-00001-of-00002.gguf"
        yield f"gguf: part {key}", name, lambda path, good, at=(key, value): gguf.save_parts(path, *at), words
    for numbers in ((0.0,) * 8, (gguf.NAN,) * 8, (-1.0,) * 8, (1.0, 2.0) * 4):
        words = "rope_freqs.weight does not scale positions as Llama 3 does"
        yield f"gguf: {numbers}", "a.gguf", lambda path, good, numbers=numbers: gguf.save_scaling(path, numbers), words


CASES = {what: row for what, *row in rows()}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with a good folder of each kind, and a good GGUF file."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("good")
    for name, save in ({name: kind.save for name, kind in folders.KINDS.items()} | folders.OTHERS).items():
        save(root / name)
    save_gguf(root / "a.gguf", *decoder("tied"), kind="Q8_0")
    return root


def peak() -> int:
    """The most memory of this process since `Path("/proc/self/clear_refs")` was written, in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def run_bounded(action: Callable[[], Any]) -> Any:
    """The result of an action that takes under 5 s and 1 GB."""
    Path("/proc/self/clear_refs").write_text("5")
    before, started = peak(), time.process_time()
    try:
        return action()
    finally:
        assert time.process_time() - started < 5
        assert peak() - before < 10**6


@pytest.mark.parametrize("what", CASES)
def test_a_bad_file_is_refused_in_a_line(good, tmp_path, what, monkeypatch):
    name, make, words = CASES[what]
    path = tmp_path / name
    make(path, good)
    monkeypatch.chdir(tmp_path)
    if path.is_dir():
        (path / "evil.py").write_text("raise SystemExit('executed')")
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    with pytest.raises(UserError, match=words) as caught:
        run_bounded(lambda: read(path))
    message = str(caught.value)
    assert "\n" not in message and caught.value.status == 2
    assert str(path) in message or "missing shard" in what
    assert not Path(files.CANARY).exists()


COMMANDS = {
    "caption": lambda path: vlm(["caption", __file__, "-c", path, "--device", "cpu"]),
    "evaluate": lambda path: vlm(["evaluate", "-c", path, "--device", "cpu"]),
    "info": lambda path: vlm(["info", "-c", path]),
    "resume": lambda path: train([f"resume={path}"]),
}


@pytest.mark.parametrize(("stated", "command"), [*zip(STATED, cycle(COMMANDS), strict=False)])
def test_every_command_refuses_a_stated_size_in_a_line(stated, command, tmp_path, capsys):
    stating(*stated)(tmp_path / "x.ckpt")
    assert run_bounded(lambda: COMMANDS[command](str(tmp_path / "x.ckpt"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "{}: {} is out of bounds".format(*stated) in line


# Checkpoints of every task that were changed, by the task's own command


def giant(about):
    """Every size of the model a million times what it was."""
    pending = [about["model"]["args"]]
    while pending:
        args = pending.pop()
        for name, value in args.items():
            if isinstance(value, dict):
                pending.append(value["args"])
            elif type(value) is int and name in ("dim", "depth", "vocab_size", "max_len"):
                args[name] = value * 10**6


def change_types(about):
    for name in about.keys() & {"tokenizer", "preprocess", "classes", "max_len"}:
        about[name] = 7 if isinstance(about[name], dict | list) else {"x": []}


def shorter(about):
    """A tokenizer, or classes, of another size than the model's."""
    if "classes" in about:
        about["classes"] = about["classes"][:1]
    else:
        about["tokenizer"] |= {"learned": "abc" if about["tokenizer"]["learned"] else "x"}


ABOUT = {
    "named": lambda about: about["model"].update(name="os.system"),
    "foreign": lambda about: about["model"].update(name="SentencePieceTokenizer"),
    "giant": giant,
    "wordless": lambda about: about.update(task=["captioning"]),
    "bare": lambda about: [about.pop(name, None) for name in ("tokenizer", "preprocess", "classes")],
    "mistyped": change_types,
    "shorter": shorter,
}


@pytest.mark.sample(plain=7, slow=20)
@pytest.mark.parametrize("changed", ABOUT)
@pytest.mark.parametrize("task", tiny.TASKS)
def test_a_changed_checkpoint_is_refused_by_the_command_of_its_task(task, changed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("story.txt").write_text(tiny.STORY)  # the text of a command; files are checked before the checkpoint
    loaded, path = read(tiny.FILES / f"{task}.ckpt"), tmp_path / "stranger.ckpt"
    ABOUT[changed](loaded["vlm"])
    write(path, loaded)
    assert vlm([*tiny.COMMANDS[task], "-c", str(path), *tiny.EXACT]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ") and "Traceback" not in said.err and len(said.err.splitlines()) <= 2
    assert said.out == ""


# What is allowed


def test_a_download_of_the_hub_is_taken_through_its_links(good, tmp_path):
    root = tmp_path / "models--a--b"
    (root / "blobs").mkdir(parents=True)
    (root / "snapshots" / "abc").mkdir(parents=True)
    for path in (good / "vit_gpt2").iterdir():
        shutil.copy(path, root / "blobs" / f"hash_{path.name}")
        (root / "snapshots" / "abc" / path.name).symlink_to(f"../../blobs/hash_{path.name}")
    assert read(root / "snapshots" / "abc")["vlm"]["task"] == "captioning"


def test_code_in_a_template_is_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "{{ ''.__class__.__mro__[1].__subclasses__()[1]('touch canary') }}"
    save_gguf(tmp_path / "a.gguf", *decoder("tied"), values={"tokenizer.chat_template": code})
    assert vlm(["generate", "-c", "a.gguf", "--prompt", "a", "--max-tokens", "2"]) == 0
    assert vlm(["info", "-c", "a.gguf"]) == 0
    assert vlm(["chat", "-c", "a.gguf"]) == 2
    assert not Path("canary").exists()


@pytest.mark.parametrize("text", ["{#", "{{raise_exception('", "{%set ", "{{'"])
def test_a_long_template_takes_no_time(tmp_path, text, capsys):
    save_gguf(tmp_path / "a.gguf", *decoder("tied"), values={"tokenizer.chat_template": text * 10**5})
    assert run_bounded(lambda: vlm(["chat", "-c", str(tmp_path / "a.gguf")])) == 2
    assert "has no chat template; use `vlm generate`" in capsys.readouterr().err


# Random changes

IMAGE, WORDS = torch.zeros(1, 3, 24, 24), torch.ones(1, 3, dtype=torch.long)
MUTATED = {  # folders, and what their models read
    **dict.fromkeys(("vit_gpt2", "blip", "git"), (IMAGE, WORDS)),
    **dict.fromkeys(("gpt2", "llama", "qwen2", "classes", "distilbert", "roberta"), (WORDS,)),
    **dict.fromkeys(("dinov2", "siglip_classes"), (IMAGE,)),
}
JSON_FILES = ("config.json",) * 2 + ("generation_config.json", "preprocessor_config.json", "tokenizer_config.json")
SIZES = re.compile("size|num|eps|act|n_|vocab|position|label")  # keys that mostly matter
MUTATIONS = 18  # a folder


@pytest.mark.sample(slow=5)
@torch.no_grad()
@pytest.mark.parametrize("name", MUTATED)
def test_any_config_is_read_or_refused_in_a_line(good, tmp_path, name):
    dice, read_count = random.Random(name), 0
    for number in range(MUTATIONS):
        folder = Path(shutil.copytree(good / name, tmp_path / str(number)))
        file = folder / dice.choice([file for file in JSON_FILES if (folder / file).is_file()])
        content = json.loads(file.read_text())
        what = f"{file.name}: {change(content, dice, mostly=SIZES)}"
        file.write_text(json.dumps(content))
        read_count += run_bounded(partial(is_read, folder, MUTATED[name], what))
        shutil.rmtree(folder)
    assert MUTATIONS / 5 < read_count < MUTATIONS  # most keys are none that a model of ours depends on


def mutate(content: bytes, dice: random.Random) -> bytes:
    """A GGUF file that is cut, or with other bytes in a place, mostly of its header."""
    place = dice.randrange(len(content) if dice.random() < 0.2 else 14000)
    if dice.random() < 0.1:
        return content[:place]
    number = dice.choice([0, 1, 255, 2**16, 2**31 - 1, 2**32 - 1, 2**62, 2**64 - 1, dice.getrandbits(64)])
    new = dice.choice([bytes([dice.randrange(256)]), struct.pack("<Q", number), struct.pack("<d", 1e300)])
    return content[:place] + new + content[place + len(new) :]


@pytest.mark.slow
@torch.no_grad()
def test_any_gguf_file_is_read_or_refused_in_a_line(good, tmp_path):
    dice, read_count, path, content = random.Random(0), 0, tmp_path / "a.gguf", (good / "a.gguf").read_bytes()
    for number in range(50):
        path.write_bytes(mutate(content, dice))
        read_count += run_bounded(partial(is_read, path, [torch.ones(1, 4, dtype=torch.long)], number))
    assert 0 < read_count < 50
