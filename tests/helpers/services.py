"""Services of `vlm serve` in this process, each model of which is loaded once, and a request of each task."""

import base64
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from tiny_checkpoints import FILES, IMAGES, ROOT, STORY

from vlm.inference.options import ModelOptions
from vlm.inference.predictor import Predictor, load_predictor

CAPTIONER = str(ROOT / "data" / "sample" / "captioner.ckpt")


@cache
def predictor_of(path: str) -> Predictor:
    return ModelOptions(checkpoint=path, device="cpu", precision="fp32").load(load_predictor)


def tiny(task: str) -> str:
    """The tiny checkpoint of a task."""
    return str(FILES / f"{task}.ckpt")


def service(path: str = CAPTIONER, *, local: bool = True, origins: tuple[str, ...] = (), **options: Any) -> Any:
    """A service of a model; options of the task are defaults of it."""
    from vlm.serving.app import Service
    from vlm.serving.server import OriginPolicy

    limits: dict[str, Any] = {"rows": 8, "max_queued": 64, "max_bytes": 2**25, "timeout": 60, "key": None}
    limits = {name: options.pop(name, value) for name, value in limits.items()}
    limits |= {"name": options.pop("name")} if "name" in options else {}
    return Service(predictor_of(path), options, **limits, origin_policy=OriginPolicy(local=local, origins=origins))


def client_of(service: Any) -> Any:
    from fastapi.testclient import TestClient

    from vlm.serving.app import make_app

    return TestClient(make_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False)


def client(path: str = CAPTIONER, **options: Any) -> Any:
    """A client of a service; arguments as in `service`."""
    return client_of(service(path, **options))


TEXTS = ["a small red circle", "a large blue cross"]
QUESTIONS = ["is there a circle?", "how many crosses are there?"]
# Of each task: inputs, and options.
CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "captioning": (IMAGES[:2], {"beam": 2, "results": 2, "max_tokens": 8}),
    "classification": (IMAGES[:2], {"top": 3}),
    "contrastive": (IMAGES[:2], {"label": TEXTS, "prompt": ["a {}", "one {}"], "top": 2}),
    "detection": (IMAGES[:2], {"find": "red cross; red circle", "min_score": 1e-6}),
    "embedding": (TEXTS, {"pooling": "first", "normalize": False}),
    "image_questions": (IMAGES[:2], {"question": QUESTIONS}),
    "language_modeling": (["A large", ""], {"max_tokens": 12, "top_k": 2, "seed": 3}),
    "masked_language_modeling": (["a [MASK] red circle", "a small [MASK] [MASK]"], {"top": 2}),
    "photo_translation": (TEXTS, {"image": IMAGES[:2], "max_tokens": 6}),
    "span_answering": ([STORY], {"question": "what is left of the cross?"}),
    "tagging": (TEXTS, {"words": True}),
    "text_classification": (TEXTS, {"pair": TEXTS[::-1], "top": 2}),
    "text_to_image": (TEXTS, {"results": 2, "top_k": 3, "guidance": 1.5, "seed": 2}),
    "translation": (TEXTS, {"prefix": "ein", "beam": 2, "max_tokens": 6}),
}


def kind_of(task: str) -> str:
    return predictor_of(tiny(task)).arguments.kind


def encode_file(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def body_of(task: str) -> dict[str, Any]:
    """The inputs and options of a case as JSON."""
    inputs, options = CASES[task]
    values = list(map(encode_file, inputs)) if kind_of(task) == "image" else inputs
    beside = {"images": list(map(encode_file, options["image"]))} if "image" in options else {}
    return {f"{kind_of(task)}s": values, **{name: one for name, one in options.items() if name != "image"}, **beside}


def form_of(task: str) -> list[tuple[str, Any]]:
    """The same as the fields of a form, where all but files are text."""
    inputs, options = CASES[task]
    fields: list[tuple[str, Any]] = []
    for name, values in ((kind_of(task), inputs), *options.items()):
        for one in values if isinstance(values, list) else [values]:
            file = name == "image"
            fields.append((name, ("photo.png", Path(one).read_bytes()) if file else (None, str(one))))
    return fields


@contextmanager
def running(app: Any, **options: Any) -> Iterator[int]:
    """The port of a server of an application in this process; options are uvicorn's."""
    import uvicorn

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
        listener.close()
