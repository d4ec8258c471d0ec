"""Captions and text as people write them, and tokenizers that are damaged or another's."""

import json
import re
from pathlib import Path

import pytest

from vlm.checkpoint import load as ckpt
from vlm.checkpoint.save import write
from vlm.cli import main as cli
from vlm.data.fields import CaptionField
from vlm.data.shapes.scene_captions import Shapes, write_coco
from vlm.data.shapes.scenes import COLORS
from vlm.data.sources.captions import Captions
from vlm.data.text.token_file import TokenFile, write_tokens
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer, tokenizer_from_state
from vlm.errors import UserError
from vlm.io.output import Output, Records
from vlm.training.run.fit import main

TEXTS = ["a red circle on the left", "two blue squares", "ein grünes Dreieck", "赤い丸"] * 20
LITERAL = ["<pad>", "</s>", "<s> </s>", "a <pad> b </s> c", "<unk>", "<0x41>", "[PAD] <|endoftext|>", "a\u2581b"]
CONTROLS = "a red\x1b[2J\x1b]0;owned\x07 circle\x08\x9b31m \u202e"
COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def tokenizers():
    subwords = {"vocab_size": 400}
    return {
        "bytes": ByteTokenizer(),
        "char": CharTokenizer().fit(TEXTS),
        "bpe": SentencePieceTokenizer(**subwords).fit(TEXTS),
        "unigram": SentencePieceTokenizer(model_type="unigram", **subwords).fit(TEXTS),
        "lower": CharTokenizer(lowercase=True).fit(TEXTS),
    }


@pytest.mark.parametrize("name", tokenizers())
def test_a_tokenizer_of_another_hash_is_refused(name):
    state = tokenizers()[name].state()
    assert tokenizer_from_state(state).fingerprint == state["fingerprint"]
    changes = [{"fingerprint": "0" * 64}, {"learned": state["learned"] + "x"}, {"class": "CharTokenizerr"}]
    changes += [{"options": state["options"] | {"lowercase": not state["options"]["lowercase"]}}, {"learned": None}]
    if state["learned"]:
        middle = len(state["learned"]) // 2
        flipped = chr(ord(state["learned"][middle]) ^ 1)
        changes += [{"learned": state["learned"][:middle] + flipped + state["learned"][middle + 1 :]}]
        changes += [{"learned": state["learned"][:middle]}, {"learned": ""}]
    for change in changes:
        with pytest.raises(UserError, match="tokenizer"):
            tokenizer_from_state(state | change)


def test_a_damaged_tokenizer_in_the_cache_is_learnt_anew(tmp_path):
    whole = CharTokenizer().fit(TEXTS, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    for data in (file.read_bytes()[:-3], b"", file.read_bytes().replace(b"a", b"b"), b"\0" * 100):
        file.write_bytes(data)
        assert CharTokenizer().fit(TEXTS, cache=tmp_path).fingerprint == whole.fingerprint
        assert file.read_bytes() == whole.fingerprint.encode() + b"\n" + whole.state()["learned"].encode("latin1")


def test_tokens_of_another_tokenizer_or_damaged_ones_are_refused(tmp_path):
    one, other = CharTokenizer().fit(TEXTS), CharTokenizer().fit(["xyz"])
    path = tmp_path / "train.tokens"
    write_tokens(path, [["a text\n"]], one, processes=1)
    assert TokenFile(path, one.fingerprint).header.documents == 1
    with pytest.raises(UserError, match=r"train\.tokens: was written with another tokenizer"):
        TokenFile(path, other.fingerprint)
    data = path.read_bytes()
    for damaged in (data[:-1], data + b"x", data[:100], b"", b"VLMTOKEN" + data[8:12] + b"\xff" * 4 + data[16:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"train\.tokens: is no whole file of tokens"):
            TokenFile(path, one.fingerprint)


@pytest.mark.parametrize("text", LITERAL)
@pytest.mark.parametrize("name", tokenizers())
def test_what_looks_like_a_special_token_stays_text(name, text):
    tokenizer = tokenizers()[name]
    ids = tokenizer.encode(text)
    assert not {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id} & set(ids)
    assert tokenizer.decode(ids) == (text.lower() if name == "lower" else text)


@pytest.mark.parametrize("max_len", [3, 8, 64])
@pytest.mark.parametrize("name", tokenizers())
def test_a_caption_that_is_too_long_is_cut_and_keeps_its_end(name, max_len):
    tokenizer = tokenizers()[name]
    field = CaptionField(tokenizer=tokenizer, max_len=max_len)
    long = field.ids("a red circle </s> " * 1000)
    assert len(long) == max_len
    assert (long[0], long[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.eos_id not in long[:-1]
    short = field.ids("a")
    assert short == [tokenizer.bos_id, *tokenizer.encode("a")[: max_len - 2], tokenizer.eos_id]


# Data sets


@pytest.fixture
def photos(tmp_path) -> Path:
    """Eight images, two captions each."""
    folder = tmp_path / "photos"
    folder.mkdir()
    scenes = {"train_scenes": 8, "val_scenes": 1, "test_scenes": 1}
    kinds = {"shapes": ["circle", "square"], "colors": list(COLORS)[:4], "sizes": ["small", "large"]}
    write_coco(Shapes(seed=0, image_size=48, captions_per_image=2, **scenes, **kinds), folder, "train", 8)
    return folder


def images_of(folder):
    return sorted(path.name for path in folder.glob("*.png"))


def table(folder, captions, name="captions.jsonl"):
    rows = [{"image": image, "caption": texts} for image, texts in zip(images_of(folder), captions, strict=True)]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


def test_empty_captions_are_skipped_and_counted(photos):
    table(photos, [["", "a"], ["  \t"], [], ["\n", "b", ""], *[["c"]] * 4])
    source = Captions(root=str(photos), path="captions.jsonl", val_fraction=0.0, test_fraction=0.0)
    assert len(source.split("train")) == 6
    assert [reason.rpartition(", ")[2] for reason in source.skipped] == [
        f"line {line}: no caption" for line in (1, 2, 3, 4, 4)
    ]
    assert all(str(photos / "captions.jsonl") in reason for reason in source.skipped)


@pytest.mark.parametrize(
    ("name", "good", "line"),
    [
        ("captions.jsonl", '{{"image": "{}", "caption": "a"}}\n', 4),
        ("captions.csv", "{},a\n", 5),
        ("captions.tsv", "{}\ta\n", 5),
    ],
)
def test_bytes_that_are_no_utf8_are_named_with_file_and_line(name, good, line, photos, tmp_path, capsys):
    rows = [good.format(image).encode() for image in images_of(photos)]
    rows[3] = rows[3].replace(b"a", b"caf\xe9")
    header = {"csv": b"image,caption\n", "tsv": b"image\tcaption\n"}.get(name.rpartition(".")[2], b"")
    (photos / name).write_bytes(header + b"".join(rows))
    runs = tmp_path / "runs"
    command = ["trainer=cpu", "data=captions", f"data.root={photos}", f"data.path={name}", f"runs={runs}"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert f"{photos / name}, line {line}: is not UTF-8" in said
    assert len(said.splitlines()) == 1
    assert not runs.exists()


def test_text_that_is_no_utf8_is_named_with_file_and_line(tmp_path, capsys):
    path = tmp_path / "text.txt"
    path.write_bytes(b"a line\n" * 20_000 + b"caf\xe9\n" + b"a line\n" * 10)
    command = ["task=language_modeling", "trainer=cpu", "data=text", f"data.path={path}", f"runs={tmp_path / 'runs'}"]
    assert main(command) == 2
    assert f"{path}, line 20001: is not UTF-8" in capsys.readouterr().err


def test_half_a_character_is_refused():
    for tokenizer in tokenizers().values():
        with pytest.raises(UserError, match="half of a surrogate pair"):
            tokenizer.encode("a \ud800 b")


# On a terminal


def test_what_is_told_of_a_fault_sends_no_commands():
    said = str(UserError(f"{CONTROLS}: cannot be read\ntry another"))
    assert not COMMANDS.search(said.replace("\n", ""))
    assert said.endswith(": cannot be read\ntry another")
    assert str(UserError(str(UserError(CONTROLS)))) == str(UserError(CONTROLS))


def test_a_record_sends_no_commands(capsys):
    records = Records(form="text", fields=("image", "caption"), output=Output(None))
    records.write({"image": f"{CONTROLS}.png", "caption": CONTROLS})
    said = capsys.readouterr().out
    assert not COMMANDS.search(said.replace("\n", "")) and said.count("\n") == 1
    assert r"\x1b[2J" in said


@pytest.mark.slow
def test_a_training_on_strange_captions(photos, tmp_path, capsys):
    strange = [
        [CONTROLS, "a </s> b"],
        ["<pad> <pad>", ""],
        ["a long one " * 500],
        ["赤い丸", "\u200d"],
        [CONTROLS],
        ["</s>"],
        ["nul \0 in it"],
        ["x"],
    ]
    table(photos, strange)
    fractions = ["data.source.val_fraction=0.4", "data.source.test_fraction=0"]
    data = ["data=captions", f"data.root={photos}", "data.path=captions.jsonl", "data.image_size=32", *fractions]
    sizes = [f"model.size.{name}" for name in ("dim=32", "num_heads=2", "encoder_depth=1", "decoder_depth=1")]
    small = ["trainer=cpu", "callbacks.progress=null", "data.num_workers=0", "data.batch_size=4", "data.max_len=32"]
    runs = tmp_path / "runs"
    assert main([*small, *data, *sizes, "tokenizer=bytes", "trainer.max_epochs=1", f"runs={runs}"]) == 0
    said = capsys.readouterr().out
    assert not COMMANDS.search(said)
    assert "captions.jsonl, line 2: no caption" in said
    (checkpoint,) = runs.glob("*/*/checkpoints/last.ckpt")
    odd = photos / "a\x1b[31m.png"
    (photos / images_of(photos)[0]).rename(odd)
    (photos / "b\x1b[31m.png").write_bytes(b"no image")
    images = [str(odd), str(photos / "b\x1b[31m.png")]
    assert cli.run(["caption", *images, "-c", str(checkpoint), "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert not COMMANDS.search(told.out) and not COMMANDS.search(told.err)
    assert r"b\x1b[31m.png: " in told.err

    loaded = ckpt.read(checkpoint)
    loaded["vlm"]["scores"] = {CONTROLS: 1.0}
    write(tmp_path / "odd.ckpt", loaded)
    assert cli.run(["info", "-c", str(tmp_path / "odd.ckpt")]) == 0
    assert not COMMANDS.search(capsys.readouterr().out)

    other = CharTokenizer().fit(TEXTS).state()
    loaded["vlm"]["tokenizer"] = other
    write(tmp_path / "other.ckpt", loaded)
    assert cli.run(["caption", images[0], "-c", str(tmp_path / "other.ckpt"), "--device", "cpu"]) == 2
    assert "tokens, its model" in capsys.readouterr().err
