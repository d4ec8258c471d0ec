"""Compares twenty turns of a conversation with fresh readings of it: their texts, and the time to the first token.

    python benchmarks/chat_turns.py FILE.gguf smolvlm_256m [--tokens 24] [--threads 1] [--wall]

A model is a checkpoint, a folder, a GGUF file, or a random model of `image_text_equality.py`, which is shown an image.
Decoding is greedy, in float32. At each turn a second conversation with the same history reads it anew, except the
image, whose states are kept there too. The printed seconds are those of turn 20 from the question to its first token,
the least of three; they are processor time unless `--wall` is given.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests" / "helpers")]

import torch

import vlm

TURNS = 20
QUESTIONS = ("What is a river?", "Why is it so?", "Name one more.", "Where would I see it?", "What comes after {}?")


def question(number: int) -> str:
    return QUESTIONS[number % len(QUESTIONS)].format(number)


def random_model(name: str, folder: Path) -> tuple[str, list[str]]:
    """Saves a random model and an image; returns the model's folder and the image's path in a list."""
    import image_text_equality as equality
    from hugging import photos, wide

    torch.manual_seed(0)
    model, processor = equality.MODELS[name]()
    model = wide(model)
    equality.even_out(model)
    model.generation_config.update(**equality.ids_of(processor.tokenizer))
    for part in (processor, model):
        part.save_pretrained(folder / "model")
    return str(folder / "model"), photos(folder / "photos", 1)


def first_token(chat: Any, text: str, clock: Any) -> float:
    """Returns the seconds to the first token of an answer, and restores the conversation."""
    read, options, start = list(chat._cache._read), chat.options, clock()
    chat.options = replace(options, max_tokens=1)
    chat.say(text)
    seconds = clock() - start
    chat.options = options
    chat.exchanges.pop()
    chat._cache._read = chat._cache._read[: len(read)]
    return seconds


def measure(path: str, images: list[str], tokens: int, clock: Any) -> None:
    model = vlm.load(path, device="cpu", precision="fp32")

    def resume_chat(exchanges: Any = ()) -> Any:
        chat = model.chat(sample=False, max_tokens=tokens)
        chat.exchanges = list(exchanges)
        return chat

    chat, equal, kept_seconds, new_seconds = model.chat(*images, sample=False, max_tokens=tokens), 0, 0.0, 0.0
    for number in range(TURNS):
        if number == TURNS - 1:
            history = chat.exchanges
            kept_seconds = min(first_token(chat, question(number), clock) for _ in range(3))
            new_seconds = min(first_token(resume_chat(history), question(number), clock) for _ in range(3))
        fresh = resume_chat(chat.exchanges)
        fresh._pending = list(chat._pending)
        chat.say(question(number))
        fresh.say(question(number))
        equal += chat.reply.tokens == fresh.reply.tokens
    print(f"{equal} of {TURNS} texts equal; turn {TURNS} reads {chat.reply.read} tokens; ", end="")
    print(
        f"first token {kept_seconds:.3f} s, in a new chat {new_seconds:.3f} s: "
        f"{new_seconds / kept_seconds:.1f} times as soon",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--wall", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            path, images = (name, []) if Path(name).exists() else random_model(name, Path(folder))
            print(f"{Path(name).name}: ", end="", flush=True)
            measure(path, images, options.tokens, time.perf_counter if options.wall else time.process_time)


if __name__ == "__main__":
    main()
