"""A model as an HTTP service: what is loaded, how it is bound, and how a signal ends it."""

import os
from collections.abc import Mapping, Sequence

from vlm.errors import UserError, print_error
from vlm.inference.options import DecodingOptions, ModelOptions, declared
from vlm.inference.predictor import Predictor, load_predictor
from vlm.inference.writing import Writer
from vlm.serving.engine import Engine
from vlm.serving.server import LOCAL, listen

KEY = "VLM_SERVE_KEY"
GRACE = 8  # seconds in which requests are answered that came before a signal
SPARE = 64  # connections beside those whose inputs may wait; bodies of all lie in memory


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
        rows: Inputs at a time.
        language: As in `make_engine`.
        host, port: The address that it listens on.
        queue: Inputs that may wait.
        max_mb: Megabytes of the largest body.
        timeout: Seconds without a new token after which a request is given up.
        allow_origin: Origins of further pages that may ask, as in `Sites`.
    Raises:
        UserError: The extra is not installed, the model takes more than one input, or the address cannot be had.
    """
    try:
        import uvicorn  # noqa: F401  of the extra, as the others

        from vlm.serving.app import Service, make_app
        from vlm.serving.sites import Sites
    except ModuleNotFoundError as fault:
        raise UserError(f'vlm serve: needs {fault.name}; pip install "vlm-lightning[serve]"') from fault
    key, sites = key_of(os.environ), Sites(local=host in LOCAL, origins=allow_origin)
    predictor = model.load(load_predictor)
    engine = make_engine(predictor, decoding, language=language, rows=rows, most=queue)
    if host not in LOCAL and key is None:
        print_error(f"whoever reaches {host} may use the service; {KEY} sets a key", "warning")
    app = make_app(Service(engine, max_bytes=max_mb * 10**6, timeout=timeout, key=key, sites=sites))
    line = f"serving     http://{host}:{{port}}/predict"
    return listen(app, host=host, port=port, line=line, connections=2 * queue + SPARE, grace=GRACE)


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


def make_engine(
    predictor: Predictor, decoding: DecodingOptions, *, language: str | None = None, rows: int, most: int
) -> Engine:
    """The engine of a model.

    Args:
        language: That of all texts, of a model of several; by default its first.
    Raises:
        UserError: An input of it is not one image or one text, or options of decoding are set for one without.
    """
    for need in {"question", "image", "label"} & {*declared(predictor.options)}:
        raise UserError(f"vlm serve: a model for {predictor.task} takes more than its input ({need}); use vlm demo")
    if isinstance(predictor, Writer):
        own = {} if language is None else {"language": language}
        search = predictor.searching(predictor.options(**vars(decoding), **own))
        return Engine(predictor, search=search, rows=rows, most=most)
    if decoding != DecodingOptions() or language is not None:
        raise UserError(f"vlm serve: a model for {predictor.task} is served with its own options; leave others out")
    return Engine(predictor, search=None, rows=rows, most=most)
