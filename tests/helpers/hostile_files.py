"""Checkpoints that a stranger may have made to do harm; each maker writes one.

What would do harm touches a canary: a file of a name that nothing else makes.
"""

import copy
import os
import zipfile

import torch

from vlm.checkpoint.file import write
from vlm.checkpoint.rebuild import rebuild
from vlm.checkpoint.stored import FORMAT, freeze
from vlm.config.compose import compose
from vlm.data.images.image import Preprocess
from vlm.data.text.tokenizer import ByteTokenizer, CharTokenizer, SentencePieceTokenizer

CANARY = "canary"
SECRET = "VLM_TEST_SECRET"
SMALL = ["data.num_workers=0", "trainer=cpu", "callbacks.progress=null"]
VIT = {"image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "num_heads": 2}
DECODER = {"vocab_size": 259, "max_len": 8, "dim": 8, "depth": 1, "num_heads": 2, "context_dim": 8}


def spec(name, /, **args):
    return {"name": name, "args": args}


def model_spec():
    parts = {"encoder": spec("ViT", **VIT), "decoder": spec("Decoder", **DECODER)}
    return spec("VisionLanguageModel", **parts)


_configs = {}


def compose_small(*overrides):
    if overrides not in _configs:
        _configs[overrides] = compose([*SMALL, *overrides])
    return copy.deepcopy(_configs[overrides])


def good():
    """A checkpoint that captions, as training writes it."""
    torch.manual_seed(0)
    model = rebuild(model_spec())
    about = {"task": "captioning", "model": model_spec(), "max_tokens": 4, "scores": {}, "data": "0" * 16}
    about |= {"tokenizer": ByteTokenizer().state(), "preprocess": Preprocess(image_size=8).state()}
    about["config"] = freeze(compose_small("task=captioning").tree)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    loops = {"fit_loop": {"epoch_progress": {"current": {"processed": 0}}}}
    return {"format": FORMAT, "vlm": about, "state_dict": state, "epoch": 0, "global_step": 1, "loops": loops}


class Call:
    """Pickles as a call, as malware does."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def touch():
    open(CANARY, "w").close()


def change_checkpoint(change):
    """A maker of the good checkpoint with a change."""

    def make(path):
        checkpoint = good()
        replaced = change(checkpoint)
        write(path, checkpoint if replaced is None else replaced)

    return make


def about(**parts):
    return change_checkpoint(lambda checkpoint: checkpoint["vlm"].update(parts))


def model(name, /, **args):
    return about(model=spec(name, **args))


def part(**args):
    parts = model_spec()["args"] | args
    return about(model=spec("VisionLanguageModel", **parts))


def change_config(change):
    return change_checkpoint(lambda checkpoint: change(checkpoint["vlm"]["config"]))


def pickle_content(content):
    def make(path):
        torch.save(content(), path)

    return make


def zip_bomb(path):
    write(path, good())
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive, archive.open("archive/data/bomb", "w") as member:
        for _ in range(2**9):
            member.write(bytes(2**20))


def packed_anew(path, compression=zipfile.ZIP_DEFLATED, change=lambda data: data):
    """The same checkpoint, its parts compressed (they may unpack to anything) or changed."""
    write(path, good() | {"more": torch.zeros(10_000)})
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in parts.items():
            archive.writestr(name, change(data))


def cut_storage(path):
    """A tensor of which the file holds a hundredth."""
    packed_anew(path, zipfile.ZIP_STORED, lambda data: data[:400] if len(data) == 40_000 else data)


def laughs(depth=60):
    value = ["ha"]
    for _ in range(depth):
        value = [value, value]
    return value


def doubled_parts(depth=40):
    value = spec("Positions")
    for _ in range(depth):
        value = spec("VisionLanguageModel", encoder=value, decoder=value)
    return value


def deep(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def tokenizer(**parts):
    return about(tokenizer=ByteTokenizer().state() | parts)


def foreign_tokenizer():
    learned = CharTokenizer().fit(["abc"]).state()
    return about(tokenizer=learned)


def broken_sentencepiece():
    from vlm.data.text import tokenizer as module

    options = SentencePieceTokenizer()._options
    learned = b"\x0a\xff\xff\xff\xff\x0f" + bytes(range(256))
    name = "SentencePieceTokenizer"
    state = {"class": name, "options": options, "learned": learned.decode("latin1")}
    return about(tokenizer=state | {"fingerprint": module.compute_fingerprint(name, options, learned)})


TIMM = {"dim": 8, "image_size": 32, "pretrained": True}
EXPANDED = {"model.decoder.token_embed.weight": torch.zeros(1).expand(10**12)}
CAPTION = ["caption", "image.png", "-c"]

# Checkpoints that are refused: who makes it.
CHECKPOINTS = {
    "pickle of os.system": pickle_content(lambda: Call(os.system, f"touch {CANARY}")),
    "pickle of open": pickle_content(lambda: good() | {"x": Call(open, CANARY, "w")}),
    "pickle of an import": pickle_content(lambda: good() | {"x": Call(__import__, "evil")}),
    "pickle of bytearray": pickle_content(lambda: good() | {"x": Call(bytearray, 2**36)}),
    "pickle of a module": pickle_content(lambda: torch.nn.Linear(2, 2)),
    "pickle of old": lambda path: torch.save(Call(os.mkdir, CANARY), path, _use_new_zipfile_serialization=False),
    "zip bomb": zip_bomb,
    "compressed": packed_anew,
    "cut storage": cut_storage,
    "expanded strides": change_checkpoint(lambda checkpoint: checkpoint["state_dict"].update(EXPANDED)),
    "expanded optimiser": change_checkpoint(
        lambda checkpoint: checkpoint.update(optimizer_states=[*EXPANDED.values()])
    ),
    "meta tensors": change_checkpoint(lambda checkpoint: checkpoint.update(x=torch.empty(10**12, device="meta"))),
    "no weights": change_checkpoint(lambda checkpoint: checkpoint.update(state_dict={})),
    "weights of numbers": change_checkpoint(lambda checkpoint: checkpoint.update(state_dict={"model.x": 1})),
    "billion laughs": about(scores={"x": laughs()}),
    "deep nesting": about(scores=deep(200)),
    "giant number": about(max_tokens=2**5000),
    "names os.system": model("os.system", command=f"touch {CANARY}"),
    "names torch.hub.load": model("torch.hub.load", repo_or_dir="stranger/net", model="net"),
    "names a dotted path": model("..os.system"),
    "names a path": model("models/vit.ViT"),
    "names a nested stranger": part(encoder=spec("subprocess.Popen", args=["touch", CANARY])),
    "names a nested function": part(encoder=spec("load_hugging_face", model=None, folder="/")),
    "hub backbone": part(encoder=spec("TimmEncoder", name="hf-hub:stranger/net", **TIMM)),
    "local backbone": part(encoder=spec("TimmEncoder", name="local-dir:/", **TIMM)),
    "backbone with ../": part(encoder=spec("TimmEncoder", name="../../net", **TIMM)),
    "backbone of wrong type": part(encoder=spec("TimmEncoder", name=["resnet18"], **TIMM)),
    "giant model": part(encoder=spec("ViT", **VIT | {"dim": 10**9})),
    "endless model": part(encoder=spec("ViT", **VIT | {"depth": 10**9})),
    "doubled parts": about(model=doubled_parts()),
    "spec of wrong type": about(model=[1, 2]),
    "spec without arguments": about(model={"name": "ViT"}),
    "vlm of wrong type": change_checkpoint(lambda checkpoint: checkpoint.update(vlm=[])),
    "task of wrong type": about(task=["captioning"]),
    "task with ../": about(task="../../captioning"),
    "length of wrong type": about(max_tokens="four"),
    "tokenizer of wrong type": about(tokenizer=7),
    "tokenizer of a stranger": tokenizer(**{"class": "os.system"}),
    "tokenizer with a path": tokenizer(learned="/etc/passwd"),
    "tokenizer of another fingerprint": tokenizer(fingerprint="0" * 64),
    "tokenizer with other options": tokenizer(options={"lowercase": False, "model_file": "/etc/passwd"}),
    "tokenizer of another model": foreign_tokenizer(),
    "tokenizer that is broken": broken_sentencepiece(),
    "preprocess of giant images": about(preprocess=Preprocess(image_size=8).state() | {"image_size": 10**6}),
    "preprocess of other images": about(preprocess=Preprocess(image_size=8).state() | {"image_size": 64}),
    "preprocess of nothing": about(preprocess=Preprocess(image_size=8).state() | {"std": [0, 0, 0]}),
    "preprocess of wrong type": about(preprocess="crop"),
    "another format": change_checkpoint(lambda checkpoint: checkpoint.update(format=1)),
    "format of wrong type": change_checkpoint(lambda checkpoint: checkpoint.update(format={"a": 1})),
}


def target(path, value):
    def change(config):
        node = config
        for key in path.split(".")[:-1]:
            node = node.setdefault(key, {})
        node[path.split(".")[-1]] = value

    return change_config(change)


# Checkpoints whose config would do harm where it is built: `vlm evaluate`, and `resume`.
CONFIGS = {
    "config names os.system": target("data.source._class_", "os.system"),
    "config names a function of ours": target("callbacks.x", {"_class_": "vlm.checkpoint.file.write", "path": CANARY}),
    "config names a target": target(
        "callbacks.x", {"_target_": "vlm.training.callbacks.checkpoints.EMA", "decay": 0.9}
    ),
    "config names a dotted class of ours": target("callbacks.x", {"_class_": "vlm.training.callbacks.checkpoints.EMA"}),
    "config writes elsewhere": target(
        "callbacks.x", {"_class_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": f"../{CANARY}"}
    ),
    "config logs elsewhere": target("logger.csv", {"_class_": "CSVLogger", "folder": CANARY}),
    "config reaches the network": target("logger.x", {"_class_": "lightning.pytorch.loggers.WandbLogger"}),
    "config sets the trainer's folder": target("trainer.default_root_dir", f"../{CANARY}"),
    "config with a plugin": target("trainer.plugins", [{"_class_": "lightning.pytorch.plugins.io.TorchCheckpointIO"}]),
    "config of wrong type": change_checkpoint(lambda checkpoint: checkpoint["vlm"].update(config=[])),
    "config without groups": change_checkpoint(lambda checkpoint: checkpoint["vlm"].update(config={"seed": 0})),
    "config with a wrong key": target("data.source.nothing", 1),
    "config reads the environment": target("name", f"${{oc.env:{SECRET}}}"),
    "config reads the environment in a key": target("name", f"${{data.${{oc.env:{SECRET}}}}}"),
    "config names a class by another key": target("data.source._class_", "${name}"),
    "config writes elsewhere by another key": change_checkpoint(
        lambda checkpoint: checkpoint["vlm"]["config"].update(
            hidden={"x": {"_class_": "CSVLogger", "folder": CANARY}}, logger="${hidden}"
        )
    ),
    "config is circular": target("name", "${name}"),
    "config unfolds": change_checkpoint(
        lambda checkpoint: checkpoint["vlm"]["config"].update(
            {f"a{n}": [f"${{a{n + 1}}}", f"${{a{n + 1}}}"] for n in range(40)}, a40="x"
        )
    ),
}
