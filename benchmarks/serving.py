"""Puts `vlm serve` under load: counts lost or mixed-up answers, and compares its rate with the engine's and a peer's.

    python benchmarks/serving.py [--requests 2000] [--clients 64] [--shape M] [--batch-size 32] [--out FILE.json]
        [--peer [--peer-requests 200] [--peer-batch 1]]

The model has shape S or M of generate.py and random weights, in a folder that `transformers` saved; the weights of its
end token are drawn so that captions have many lengths. Photos of mixed sizes are drawn and stored as JPEG. `vlm serve`
runs in its own process; each client has one connection and sends photo after photo, 5% of them truncated. Every answer
is compared with the caption of that photo made without the service; it is "mixed up" if it is the caption of another
photo. The engine's rate is that of `vlm.load(...).caption` for the same list of files, measured once before and once
after. Seconds are the waiting times of clients for intact photos.

The peer is `generate` from the same folder behind FastAPI: one request at a time, or with --peer-batch the waiting
requests together. It answers fewer requests; rates are compared. All sides compute in float32 on all cores, which they
share with the clients.
"""

import argparse
import json
import os
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))  # for hugging.wide

from vlm.machine import tune

tune()  # applies to all sides
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SHAPES = {
    "S": {"image": 96, "dim": 256, "heads": 4, "encoder": 6, "decoder": 6},
    "M": {"image": 224, "dim": 384, "heads": 6, "encoder": 12, "decoder": 6},
}
TOKENS, VOCAB = 32, 8000
SIZES = [(160, 120), (320, 240), (480, 640), (640, 480), (1024, 768)]
BAD = 20  # every 20th request is bad
ENDS, POSITIONS = 2.0, 16.0  # factors of weights that make captions differ in words and length
Answer = tuple[int, int, str, float]  # photo, status, text, seconds


def make_model(shape: str, folder: Path) -> None:
    """Saves a captioner, its tokenizer and its processor."""
    import torch
    import transformers as t
    from hugging import wide
    from pretrained_equality import even_out
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    size, end = SHAPES[shape], "<|endoftext|>"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in alphabet for b in alphabet][: VOCAB - 1 - len(alphabet)]
    pieces = [*alphabet, *(a + b for a, b in merges), end]
    bytes_ = Tokenizer(models.BPE(vocab={piece: id for id, piece in enumerate(pieces)}, merges=merges))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = t.PreTrainedTokenizerFast(tokenizer_object=bytes_, bos_token=end, eos_token=end, unk_token=end)
    torch.manual_seed(0)
    sizes = {"hidden_size": size["dim"], "num_attention_heads": size["heads"], "intermediate_size": 4 * size["dim"]}
    vit = t.ViTConfig(image_size=size["image"], patch_size=16, num_hidden_layers=size["encoder"], **sizes)
    id = tokenizer.eos_token_id
    gpt2 = t.GPT2Config(
        vocab_size=VOCAB,
        n_positions=TOKENS + 2,
        n_embd=size["dim"],
        n_layer=size["decoder"],
        n_head=size["heads"],
        bos_token_id=id,
        eos_token_id=id,
        add_cross_attention=True,
        is_decoder=True,
    )
    model = t.VisionEncoderDecoderModel(
        encoder=t.ViTModel(vit, add_pooling_layer=False), decoder=t.GPT2LMHeadModel(gpt2)
    )
    even_out(wide(model))  # so that logits do not tie
    model.decoder.transformer.wpe.weight.data *= POSITIONS  # otherwise a model with tied embeddings repeats a token
    model.decoder.transformer.wte.weight.data[id] *= ENDS
    special = {"decoder_start_token_id": id, "bos_token_id": id, "eos_token_id": id, "pad_token_id": id}
    model.generation_config.update(**special, max_new_tokens=TOKENS)
    processor = t.ViTImageProcessor(size={"height": size["image"], "width": size["image"]})
    for part in (model, tokenizer, processor):
        part.save_pretrained(folder)


def draw_photos(folder: Path, count: int) -> list[Path]:
    """Draws photos of mixed sizes: gradients with noise."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    random, paths = np.random.default_rng(0), [folder / f"{number:04}.jpg" for number in range(count)]
    for number, path in enumerate(paths):
        width, height = SIZES[number % len(SIZES)]
        x, y = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
        corners = random.uniform(0, 255, (3, 3))
        pixels = corners[0] * (1 - x) + corners[1] * x * (1 - y) + corners[2] * x * y
        pixels = pixels + random.normal(0, 12, (height, width, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)
    return paths


@contextmanager
def process(*arguments: str) -> Any:
    """Runs a server in a separate process; yields its port."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            port = re.search(r"http://127\.0\.0\.1:(\d+)", line)
            assert port is not None, line
            yield int(port[1])
        finally:
            server.send_signal(signal.SIGTERM)


def load(port: int, photos: list[bytes], plan: list[int], clients: int) -> tuple[list[Answer], float]:
    """Sends requests from many clients; returns the answers and the total seconds.

    Args:
        plan: Index of the photo of each request; every BAD-th request is truncated.
    """
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    for number, photo in enumerate(plan):
        waiting.put((number, photo))
    answers: list[Answer] = []

    def talk() -> None:
        http = HTTPConnection("127.0.0.1", port, timeout=600)
        while True:
            try:
                number, photo = waiting.get_nowait()
            except queue.Empty:
                return
            bad = is_bad(number)
            start = time.perf_counter()
            try:
                http.request("POST", "/predict", photos[photo][: 600 if bad else None])
                response = http.getresponse()
                content, status = json.loads(response.read()), response.status
            except (OSError, ValueError):
                http.close()
                content, status = {}, 0
            text = content["results"][0]["text"] if status == 200 else ""
            answers.append((-1 if bad else photo, status, text, time.perf_counter() - start))

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for one in [pool.submit(talk) for _ in range(clients)]:
            one.result()
    return answers, time.perf_counter() - start


def is_bad(number: int) -> bool:
    return number % BAD == BAD - 1


def count_answers(answers: list[Answer], truth: list[str]) -> dict[str, int]:
    """Counts answers: lost ones, captions of another photo, other wrong texts, and bad requests not refused."""
    good = [answer for answer in answers if answer[0] >= 0]
    wrong = [text for photo, status, text, _ in good if status == 200 and text != truth[photo]]
    return {
        "good": len(good),
        "bad": len(answers) - len(good),
        "lost": sum(status != 200 for _, status, _, _ in good),
        "mixed_up": sum(text in truth for text in wrong),
        "otherwise_wrong": sum(text not in truth for text in wrong),
        "bad_not_refused": sum(status != 400 for photo, status, _, _ in answers if photo < 0),
    }


def serve_peer(folder: str, batch: int) -> None:
    """Serves a captioner of `transformers` with FastAPI."""
    import io

    import torch
    import transformers as t
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from PIL import Image

    model = t.VisionEncoderDecoderModel.from_pretrained(folder).eval()
    tokenizer, processor = t.AutoTokenizer.from_pretrained(folder), t.ViTImageProcessor.from_pretrained(folder)
    waiting: queue.SimpleQueue[tuple[Any, Future]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            taken = [waiting.get()]
            while len(taken) < batch and not waiting.empty():
                taken.append(waiting.get())
            with torch.inference_mode():
                tokens = model.generate(torch.cat([pixels for pixels, _ in taken]), num_beams=1, do_sample=False)
            for text, (_, answer) in zip(tokenizer.batch_decode(tokens, skip_special_tokens=True), taken, strict=True):
                answer.set_result(text)

    app = FastAPI()

    def read_pixels(body: bytes) -> Any:
        return processor(Image.open(io.BytesIO(body)).convert("RGB"), return_tensors="pt").pixel_values

    @app.post("/predict")
    async def predict(request: Request) -> Any:
        import asyncio

        try:
            pixels = await asyncio.to_thread(read_pixels, await request.body())
        except OSError:
            return Response(json.dumps({"detail": "damaged"}), 400)
        answer: Future = Future()
        waiting.put((pixels, answer))
        return {"results": [{"text": await asyncio.wrap_future(answer)}]}

    threading.Thread(target=work, daemon=True).start()
    config = uvicorn.Config(app, port=0, log_level="warning")
    sockets = [config.bind_socket()]
    sockets[0].listen(config.backlog)
    print(f"http://127.0.0.1:{sockets[0].getsockname()[1]}", flush=True)
    uvicorn.Server(config).run(sockets=sockets)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Returns the figures of the service and of the engine alone."""
    import vlm

    paths = draw_photos(folder / "photos", args.photos)
    photos = [path.read_bytes() for path in paths]
    model = vlm.load(str(folder / "model"), device="cpu", precision="fp32")
    truth = [text.text for text in model.caption([str(path) for path in paths], batch_size=args.batch_size)]
    plan = [number * 7919 % len(paths) for number in range(args.requests)]
    good = [str(paths[photo]) for number, photo in enumerate(plan) if not is_bad(number)]

    def engine() -> float:
        start = time.perf_counter()
        model.caption(good, batch_size=args.batch_size)
        return len(good) / (time.perf_counter() - start)

    before = engine()
    options = ["-c", str(folder / "model"), "--port", "0", "--device", "cpu", "--precision", "fp32"]
    with process("-m", "vlm", "serve", *options, "--batch-size", str(args.batch_size)) as port:
        load(port, photos, plan[: args.clients], args.clients)  # warms up
        answers, seconds = load(port, photos, plan, args.clients)
    rates = before, engine()
    row: dict[str, Any] = count_answers(answers, truth) | {
        "texts": len({*truth}),
        "tokens": sorted_lengths(model, paths),
    }
    waits = statistics.quantiles([wait for photo, _, _, wait in answers if photo >= 0], n=100)
    row |= {"p50_s": waits[49], "p99_s": waits[98], "requests_s": len(answers) / seconds}
    row |= {"images_s": row["good"] / seconds, "engine_images_s": statistics.mean(rates)}
    row["ratio_to_engine"] = row["images_s"] / row["engine_images_s"]
    if args.peer:
        fewer = plan[: args.peer_requests]
        with process(__file__, "--serve-peer", str(folder / "model"), "--peer-batch", str(args.peer_batch)) as port:
            load(port, photos, plan[:8], 8)
            answers, seconds = load(port, photos, fewer, args.clients)
        row |= {f"peer_{name}": count for name, count in count_answers(answers, truth).items()}
        row["peer_requests_s"] = len(answers) / seconds
        row["ratio_to_peer"] = row["requests_s"] / row["peer_requests_s"]
    return row


def sorted_lengths(model: Any, paths: list[Path]) -> list[int]:
    """Returns the numbers of tokens of the shortest, the median and the longest caption."""
    lengths = sorted(len(text.tokens) for text in model.caption([str(path) for path in paths]))
    return [lengths[0], lengths[len(lengths) // 2], lengths[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--photos", type=int, default=200)
    parser.add_argument("--shape", choices=list(SHAPES), default="M")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-requests", type=int, default=200)
    parser.add_argument("--peer-batch", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--serve-peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_peer:
        serve_peer(args.serve_peer, args.peer_batch)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(args.shape, Path(folder) / "model")
        row = measure(args, Path(folder))
    for name, value in row.items():
        print(f"{name:<22}{value:>10.3f}" if isinstance(value, float) else f"{name:<22}{value!s:>10}")
    if args.out is not None:
        Path(args.out).write_text(json.dumps(row, indent=1) + "\n")


if __name__ == "__main__":
    main()
