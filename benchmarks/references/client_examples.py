"""Runs the examples of docs/clients.md, with a Python that has the clients, against a small random model.

    python benchmarks/references/client_examples.py FOLDER PYTHON

It runs in the environment of vlm with its `test` extra, writes the model to FOLDER, and prints how each example ends.
`clients.sh` runs it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "helpers")]
MODEL = "SmolLM2-135M-Instruct"  # as the page calls it
CLIENTS = ("openai", "langchain_openai", "litellm")


def main(folder: Path, python: str) -> int:
    import torch
    from chats import saved_chat
    from serving_load import run_service

    torch.manual_seed(5)
    saved_chat(folder / MODEL, "chatml", room=256)
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    failures = 0
    with run_service(folder / MODEL, "--precision", "fp32", "--seed", "1") as (port, _):
        for block in blocks:
            client = next(name for name in CLIENTS if re.search(rf"(from|import) {name}\b", block))
            example = block.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            offline = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
            done = subprocess.run([python, "-c", example], capture_output=True, text=True, env=offline)
            failures += done.returncode != 0 or not done.stdout.strip()
            print(f"{client}: exit status {done.returncode}, {len(done.stdout)} characters", flush=True)
            if done.returncode:
                print(done.stderr[-2000:])
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
