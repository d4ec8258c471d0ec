"""Services of `vlm serve` in this process, each model of which is loaded once."""

from functools import cache
from typing import Any

from tiny_checkpoints import FILES, ROOT

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
    from vlm.serving.sites import Sites

    limits: dict[str, Any] = {"rows": 8, "most": 64, "max_bytes": 2**25, "timeout": 60, "key": None}
    limits = {name: options.pop(name, value) for name, value in limits.items()}
    return Service(predictor_of(path), options, **limits, sites=Sites(local=local, origins=origins))


def client_of(service: Any) -> Any:
    from fastapi.testclient import TestClient

    from vlm.serving.app import make_app

    return TestClient(make_app(service), base_url="http://127.0.0.1", raise_server_exceptions=False)


def client(path: str = CAPTIONER, **options: Any) -> Any:
    """A client of a service; arguments as in `service`."""
    return client_of(service(path, **options))
