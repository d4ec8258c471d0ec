"""Runs docs/onnx_chat.py, which answers questions with the graphs of an export."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_script(folder: Path, question: str, paths: list[str]) -> list[str]:
    """The texts of docs/onnx_chat.py, where neither torch nor vlm can be imported."""
    refuse = "import sys, runpy; sys.modules |= {'torch': None, 'vlm': None}; sys.argv = sys.argv[1:]; "
    words = [sys.executable, "-c", refuse + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    words += [str(ROOT / "docs" / "onnx_chat.py"), str(folder), question, *paths]
    done = subprocess.run(words, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    texts = done.stdout.decode().split(f"{Path(paths[0]).parent}/")[1:]
    return [text.partition("\t")[2].removesuffix("\n") for text in texts]


def limit_tokens(folder: Path, count: int) -> None:
    """Sets the largest number of tokens of a text in graphs.json."""
    about = json.loads((folder / "graphs.json").read_text())
    about["writes"]["max_tokens"] = count
    (folder / "graphs.json").write_text(json.dumps(about))
