"""One tiny checkpoint a task, with what the commands made of it: `python tests/helpers/tiny_checkpoints.py` makes them.

They are made for a new task, and anew only when the format's number changes: later versions must read the files of
earlier ones.
"""

import io
import json
import os
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from PIL import Image

from vlm.checkpoint.file import write
from vlm.checkpoint.load import read
from vlm.cli.main import run as vlm
from vlm.training.run.fit import main as train

ROOT = Path(__file__).parents[2]
FILES = ROOT / "tests" / "checkpoint" / "files"
IMAGES = [str(path) for path in sorted((ROOT / "data" / "sample").glob("*.png"))[:3]]
EXACT = ["--device", "cpu", "--precision", "fp32", "--format", "jsonl"]
COMMON = ["trainer=cpu", "trainer.precision=32-true", "compile=false", "callbacks.progress=null", "data.num_workers=0"]
COMMON += ["data.batch_size=8", "model.size.dim=16", "model.size.num_heads=2", "trainer.max_steps=40"]
SCENES = [
    "data.source.train_scenes=160",
    "data.source.val_scenes=8",
    "data.source.test_scenes=12",
    "data.image_size=32",
]
SMALL = [*SCENES, "model.size.encoder_depth=1", "model/encoder=vit", "model.encoder.patch_size=8"]
TASKS = {
    "captioning": [*SMALL, "model.size.decoder_depth=1", "tokenizer=bytes", "optim.lr=1e-2", "callbacks=ema"],
    "classification": [*SMALL, "optim.lr=1e-2"],
    "contrastive": [*SMALL, "tokenizer=bytes", "optim.lr=1e-2", "data.max_len=96"],
    "detection": [
        *[*SMALL, "model.size.decoder_depth=1", "optim.lr=2e-2", "data.source.train_scenes=3200", "data.max_len=40"],
        *["data.source.max_objects=2", "data.source.object_weights=[1,1]", "trainer.max_steps=400"],
    ],
    "image_questions": [
        *[*SMALL, "model.size.decoder_depth=1", "tokenizer=bytes", "optim.lr=1e-2", "model/fusion=prefix"],
        *["data.max_len=96", "task.max_tokens=12"],
    ],
    "language_modeling": [
        *("data.source.train_documents=40", "data.source.val_documents=4", "data.source.test_documents=4"),
        *("trainer.max_steps=400", "trainer.max_epochs=20", "trainer.check_val_every_n_epoch=20"),
        *("data.train_samples=160", "model.size.depth=1", "data.max_len=32", "task.sampled_batches=2", "optim.lr=1e-2"),
    ],
    "masked_language_modeling": [
        *("data.source.train_captions=160", "data.source.val_captions=8", "data.source.test_captions=12"),
        *("model.size.encoder_depth=1", "optim.lr=1e-2"),
    ],
    "photo_translation": [
        *[*SCENES, "model.size.encoder_depth=1", "model.size.decoder_depth=1", "optim.lr=2e-2"],
        *["model.image_encoder.stem=null", "model.image_encoder.patch_size=8"],
    ],
    "span_answering": [
        *("data.source.train_stories=160", "data.source.val_stories=8", "data.source.test_stories=12"),
        *("model.size.encoder_depth=1", "optim.lr=1e-2"),
    ],
    "text_classification": [
        *("data.source.train_pairs=160", "data.source.val_pairs=8", "data.source.test_pairs=12", "optim.lr=1e-2"),
        *("model.size.encoder_depth=1", "tokenizer=bytes", "data.max_len=120"),
    ],
    "tagging": [
        *("data.source.train_captions=160", "data.source.val_captions=8", "data.source.test_captions=12"),
        *("model.size.encoder_depth=1", "tokenizer=char", "data.max_len=60", "optim.lr=1e-2"),
    ],
    "text_to_image": [
        *[*SCENES, "model.size.encoder_depth=1", "model.size.decoder_depth=1", "task.fields.images.num_codes=64"],
        *["tokenizer=bytes", "data.max_len=96", "task.captioner=null", "optim.lr=2e-2"],
    ],
    "translation": [*SCENES[:3], "model.size.encoder_depth=1", "model.size.decoder_depth=1", "optim.lr=2e-2"],
}
STORY = "the small red circle is left of the large blue cross. the large blue cross is above the small green circle."
QUESTIONS = ["--question", "how many circles are there?", "--question", "is there a red cross?"]
COMMANDS = {
    "captioning": ["caption", *IMAGES, "--max-tokens", "12"],
    "classification": ["classify", *IMAGES],
    "contrastive": ["classify", *IMAGES, "--label", "red circle", "--label", "blue cross", "--prompt", "a large {}"],
    "detection": ["detect", *IMAGES],
    "image_questions": ["answer", *IMAGES, *QUESTIONS],
    "language_modeling": ["generate", "--prompt", "A large", "--prompt", "", "--max-tokens", "24", "--top-k", "1"],
    "masked_language_modeling": ["fill", "a [MASK] red circle", "a small [MASK] [MASK]", "--top", "3"],
    "photo_translation": [
        *["translate", "--text", "a small colored circle", "--text", "a large colored cross", "--beam", "2"],
        *["--image", IMAGES[0], "--image", IMAGES[1]],
    ],
    "span_answering": ["answer", "story.txt", "--question", "what is left of the large blue cross?"],
    "text_classification": ["classify", "--text", "a red dot", "--pair", "a dot", "--text", "x y", "--pair", "x"],
    "tagging": ["tag", "--text", "a small red circle left of a cross", "--text", "It isn't!"],
    "text_to_image": [*["draw", "--text", "a small red circle", "--text", "a large blue cross"], "--out", "pictures"],
    "translation": ["translate", "--text", "a small red circle", "--text", "a large blue cross", "--beam", "2"],
}


def outputs(task: str, path: Path) -> dict:
    """The records that the task's command writes with a checkpoint, and its metrics on the test split."""
    said = io.StringIO()
    Path("story.txt").write_text(STORY)
    with redirect_stdout(said):
        assert vlm([*COMMANDS[task], "-c", str(path), *EXACT]) == 0
    records = [json.loads(line) for line in said.getvalue().splitlines()]
    for record in records:
        record.pop("image", None)  # its path
        if "path" in record:
            record["mean"] = float(np.asarray(Image.open(record["path"]), float).mean())  # of a drawn picture
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        assert vlm(["evaluate", "-c", str(path), "--device", "cpu", "--out", folder]) == 0
        metrics = json.loads((Path(folder) / "metrics.json").read_text())
    return {"records": records, "metrics": metrics}


def make(task: str) -> None:
    """Trains a tiny model of a task, and keeps its checkpoint and its outputs."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        assert train([f"task={task}", *COMMON, *TASKS[task]]) == 0
        (best,) = Path(folder).glob("runs/*/*/checkpoints/best.ckpt")
        kept = {name: value for name, value in read(best).items() if name not in ("optimizer_states", "lr_schedulers")}
        path = FILES / f"{task}.ckpt"
        write(path, kept)
        path.with_suffix(".json").write_text(json.dumps(outputs(task, path), indent=1) + "\n")


def make_embedder() -> None:
    """Keeps the encoder of a model that fills in gaps: nothing trains one for its vectors."""
    loaded = read(FILES / "masked_language_modeling.ckpt")
    about, prefix = loaded["vlm"], "model.encoder."
    own = {"task": "embedding", "scores": {}, "origin": "TextEncoder", "model": about["model"]["args"]["encoder"]}
    own |= {name: about[name] for name in ("tokenizer", "max_len")}
    own["embedding"] = {"pooling": "mean", "normalize": True}
    state = {
        f"model.{name[len(prefix) :]}": one for name, one in loaded["state_dict"].items() if name.startswith(prefix)
    }
    whole = {"format": loaded["format"], "vlm": own, "state_dict": state, "global_step": 0, "epoch": -1}
    write(FILES / "embedding.ckpt", whole)


if __name__ == "__main__":
    for name in sys.argv[1:] or [*TASKS, "embedding"]:
        make(name) if name in TASKS else make_embedder()
