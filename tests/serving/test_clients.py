"""The examples of the page on clients run as they are written, against a service with a small random model."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chats import saved_chat
from services import running, service
from tiny_checkpoints import ROOT

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS = [block for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S) if "from openai" in block]
CURL = [line for line in PAGE.splitlines() if line.startswith("curl ")]


@pytest.fixture(scope="module")
def port(tmp_path_factory: Any) -> Iterator[int]:
    from vlm.serving.app import make_app

    torch.manual_seed(5)
    saved_chat(folder := tmp_path_factory.mktemp("words"), "chatml", room=128)
    with running(make_app(service(str(folder), name="SmolLM2-135M-Instruct")), log_level="error") as number:
        yield number


@pytest.mark.parametrize("place", range(2))
def test_the_examples_of_the_official_client_run(port: int, place: int, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai")
    exec(BLOCKS[place].replace("127.0.0.1:8000", f"127.0.0.1:{port}"), {})
    assert capsys.readouterr().out.strip() and len(BLOCKS) == 2


@pytest.mark.parametrize("line", CURL)
def test_the_lines_of_curl_run(port: int, line: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    line = line.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("curl ", "curl --silent ", 1)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    if "stream" in line:
        assert "error" not in done.stdout and done.stdout.endswith("data: [DONE]\n\n")
    else:
        answer = json.loads(done.stdout)
        assert "error" not in answer and answer["object"] in ("list", "chat.completion", "text_completion")
