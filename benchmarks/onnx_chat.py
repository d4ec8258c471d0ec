"""Compares docs/onnx_chat.py, which has neither torch nor vlm, with `vlm caption` and `vlm answer` on drawn scenes.

`python benchmarks/onnx_chat.py [SCENES]` makes small models with random weights, exports them to ONNX, and counts the
scenes (default 200) with equal texts. Scenes have the size that each model reads, but a larger one for SmolVLM, whose
images Pillow resizes in both.
"""

import contextlib
import io
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

import torch
from image_text import saved_image_text
from onnx_chats import limit_tokens, run_script

import vlm
from vlm.cli.main import run
from vlm.data.shapes import scene_captions

SIDES = {"smolvlm_tiles": 96, "smolvlm": 96, "llava_siglip": 32, "paligemma": 32}
TOKENS = 12  # of a text


def draw_scenes(folder: Path, side: int, count: int) -> list[str]:
    """Saves scenes of the test split of data=shapes; returns their paths."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert scene_captions.main([str(folder), "--count", str(count), "--image-size", str(side)]) == 0
    return sorted(map(str, folder.glob("*.png")))


def compare(name: str, folder: Path, paths: list[str]) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        saved_image_text(folder / "model", name)
    with contextlib.redirect_stdout(io.StringIO()):
        assert run(["export", str(folder / "onnx"), "-c", str(folder / "model"), "--to", "onnx"]) == 0
    limit_tokens(folder / "onnx", TOKENS)
    model = vlm.load(folder / "model", device="cpu", precision="fp32")
    for question in ("", "what is it?"):
        found = run_script(folder / "onnx", question, paths)
        expected = [
            model.answer(path, question, max_tokens=TOKENS) if question else model.caption(path, max_tokens=TOKENS)
            for path in paths
        ]
        texts = [one.text.strip(" ") for one in expected]
        equal = sum(a == b for a, b in zip(found, texts, strict=True))
        kind = "answers" if question else "captions"
        print(f"{name}: {equal} of {len(paths)} {kind} equal, {len({*texts})} different ones", flush=True)


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as work:
        for name, side in SIDES.items():
            compare(name, Path(work) / name, draw_scenes(Path(work) / name / "scenes", side, count))
