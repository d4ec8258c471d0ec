"""A model as an HTTP service: what is loaded, how it is bound, and how a signal ends it."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from vlm.errors import UserError, print_error
from vlm.inference.options import DecodingOptions, ModelOptions
from vlm.inference.predictor import load_predictor
from vlm.serving.server import LOCAL, listen

KEY = "VLM_SERVE_KEY"
GRACE = 8  # seconds in which requests are answered that came before a signal
SPARE = 64  # connections beside those whose inputs may wait


def serve(
    model: ModelOptions,
    decoding: DecodingOptions,
    *,
    rows: int,
    language: str | None,
    host: str,
    port: int,
    queue: int,
    max_mb: int,
    timeout: int,
    allow_origin: Sequence[str],
) -> int:
    """Serves a model until a signal; returns 128 and its number as the exit status.

    Args:
        decoding, language: Options that hold where a request states no others.
        rows: Inputs at a time.
        host, port: The address that it listens on.
        queue: Inputs that may wait.
        max_mb: Megabytes of the largest body.
        timeout: Seconds without a new token after which a request is given up.
        allow_origin: Origins of further pages that may ask, as in `Sites`.
    Raises:
        UserError: The extra is not installed, options do not go with the model, or the address cannot be had.
    """
    try:
        import uvicorn  # noqa: F401  of the extra, as the others

        from vlm.serving.app import Service, make_app
        from vlm.serving.sites import Sites
    except ModuleNotFoundError as fault:
        raise UserError(f'vlm serve: needs {fault.name}; pip install "vlm-lightning[serve]"') from fault
    key, sites = key_of(os.environ), Sites(local=host in LOCAL, origins=allow_origin)
    predictor = model.load(load_predictor)
    defaults = {name: value for name, value in vars(decoding).items() if value != getattr(DecodingOptions, name)}
    defaults |= {} if language is None else {"language": language}
    limits: Any = {"most": queue, "max_bytes": max_mb * 10**6, "timeout": timeout}
    service = Service(predictor, defaults, rows=rows, **limits, key=key, sites=sites)
    if host not in LOCAL and key is None:
        print_error(f"whoever reaches {host} may use the service; {KEY} sets a key", "warning")
    line = f"serving     http://{host}:{{port}}/predict"
    return listen(make_app(service), host=host, port=port, line=line, connections=2 * queue + SPARE, grace=GRACE)


def key_of(environment: Mapping[str, str]) -> str | None:
    """The key of the environment, if there is one.

    Raises:
        UserError: No client could send it.
    """
    key = environment.get(KEY)
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        fault = "is empty" if not key else "has white space, or letters that are not ASCII"
        raise UserError(f"{KEY}: {fault}; give a word of ASCII letters, or unset it to serve without a key")
    return key
