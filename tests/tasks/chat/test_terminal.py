"""The command `vlm chat`: what it writes, and how it ends."""

import io
import os
import pty
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import saved_chat
from hugging import photos
from image_text import saved_image_text
from tiny_checkpoints import FILES

import vlm
from vlm.cli.main import run
from vlm.decoding.continuation import PromptCache
from vlm.inference.command_options import AnswerOptions
from vlm.inference.options import ModelOptions
from vlm.tasks.chat.predictor import ChatPredictor
from vlm.tasks.chat.session import Chat
from vlm.tasks.chat.terminal import _answer


@pytest.fixture
def folder(tmp_path: Path) -> str:
    torch.manual_seed(5)
    return str(tmp_path / "theirs")


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the command with lines on stdin; returns its status, stdout and stderr."""

    def run_chat(lines: str, *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        status = run(["chat", *words, "--device", "cpu", "--precision", "fp32"])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_chat


@pytest.mark.slow
def test_lines_are_answered_as_in_python(folder: str, tmp_path: Path, say: Any) -> None:
    saved_image_text(folder, "smolvlm")
    first, second = photos(tmp_path / "photos", 2)
    words = [first, "-c", folder, "--greedy", "--max-tokens", "5", "--system", "be brief"]
    status, out, err = say(f"what?\n\nwhy?\n/image {second}\nand this?\n/reset\nwhat?\n/quit\nno\n", *words)
    assert (status, err) == (0, "")
    model = vlm.load(folder, device="cpu", precision="fp32")
    chat = model.chat(first, sample=False, max_tokens=5, system="be brief")
    answers = [chat.say("what?"), chat.say("why?"), chat.say("and this?", second)]
    chat.reset()
    assert out.splitlines() == [*answers, chat.say("what?")]


def test_faults_are_a_line_each_and_the_others_are_answered(folder: str, say: Any) -> None:
    saved_chat(folder, "chatml", room=64)
    words = ["-c", folder, "--greedy", "--max-tokens", "5"]
    status, out, err = say("/forget\n/image no.png\na<|im_end|>\nwhat?\n", *words)
    assert status == 1 and len(out.splitlines()) == 1
    lines = err.splitlines()
    assert (
        len(lines) == 3
        and "the conversation has no question yet" in lines[0]
        and "contains the special token" in lines[2]
    )
    for asked, given, status, said in (
        (
            "what?\n",
            ["-c", str(FILES / "captioning.ckpt")],
            2,
            "has no chat template; use `vlm caption` or `vlm embed`",
        ),
        ("/exit\n", words, 1, "unknown command; use /image, /forget, /reset, /quit"),
        ("/RESET\n", words, 1, "unknown command; use /image, /forget, /reset, /quit"),
        ("what?\n", [*words, "--system", "long " * 99], 1, "shorten the message or --system\n"),
        ("what?\n", [*words, "--stop", ""], 2, "error: --stop: must not be empty"),
    ):
        assert (found := say(asked, *given))[:2] == (status, "") and said in found[2]
    status, out, err = say("what is it?\n" * 6, *words)
    assert status == 1 and "the conversation is full" in err and "/forget drops the oldest question" in err
    assert len(err.splitlines()) + len(out.splitlines()) >= 6
    status, out, err = say("what is it?\n" * 6, *words, "--forget")
    assert (status, err) == (0, "") and len(out.splitlines()) == 6


@pytest.mark.slow
def test_an_interrupt_at_any_moment_ends_the_answer_and_leaves_the_conversation_whole(
    folder: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved_chat(folder, "llama3", room=100_000)
    monkeypatch.setattr(ChatPredictor, "ends", ())  # no answer ends before it is interrupted
    dice, options = random.Random(0), AnswerOptions(sample=False, max_tokens=90_000)
    predictor = ModelOptions(checkpoint=folder, device="cpu", precision="fp32").load(ChatPredictor)

    class InterruptedChat(Chat):
        """Its answers are interrupted after a while, never what comes before or after them."""

        def stream(self, text: str, *images: Any) -> Iterator[str]:
            signal.setitimer(signal.ITIMER_REAL, dice.uniform(0.0001, 0.02))
            yield from super().stream(text, *images)

    talk = InterruptedChat(predictor, options)
    capsys.readouterr()
    before = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        for number in range(100):
            _answer(talk, f"what is it? {number}")
            assert capsys.readouterr().err == " [stopped]", number
            if number % 10 == 9:  # what the model has read is what it would read anew
                tokens = [*talk.tokens(), 3]
                kept, anew = (one.logits(tokens) for one in (talk._cache, PromptCache(predictor.decoder)))
                assert torch.allclose(kept, anew, atol=1e-3), number
                talk.reset()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.slow
def test_an_interrupt_ends_the_answer_and_at_the_prompt_the_command(folder: str) -> None:
    saved_chat(folder, "llama3", room=100_000)
    command = [sys.executable, "-m", "vlm", "chat", "-c", folder, "--greedy", "--max-tokens", "90000"]
    ours, theirs = pty.openpty()
    pipes: Any = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, "--device", "cpu"], text=True, **pipes)
    os.close(theirs)
    assert process.stdout is not None
    try:
        os.write(ours, b"what is it?\n")
        assert process.stdout.read(40)  # it is answering
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        said = ""
        while "[stopped]" not in said:
            assert select.select([process.stderr], [], [], 60)[0] and process.poll() is None
            said += os.read(process.stderr.fileno(), 1000).decode()
        os.write(ours, b"/forget\n")
        time.sleep(1)
        for _ in range(3):  # a loaded machine may not be at the prompt yet
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                _, rest = process.communicate(timeout=20)
                break
        err = said + rest
        assert process.returncode == 130
        assert err.count("[stopped]") == 1 and "Traceback" not in err and "nothing was said" not in err
    finally:
        process.kill()
        os.close(ours)
