"""`vlm serve`: loads a model and serves it over HTTP until a signal."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from vlm.checkpoint.locate import PREFIX
from vlm.errors import UserError, print_error, printable
from vlm.inference.options import BatchSize, DecodingOptions, Language, ModelOptions, Option
from vlm.machine import paused_collection
from vlm.serving.server import LOCAL_HOSTS, OriginPolicy, listen, reachable_urls

KEY = "VLM_SERVE_KEY"
GRACE = 8  # seconds after a signal in which earlier requests are still answered
SPARE_CONNECTIONS = 64  # connections in addition to those whose inputs may wait


@dataclass(kw_only=True)
class ServiceDecodingOptions(DecodingOptions):
    """Decoding options of requests that do not set them."""

    # None, so that --seed 0 differs from no --seed.
    seed: Annotated[int | None, Option("Random seed. By default random for conversations and 0 for /predict.")] = None  # type: ignore[assignment]


def serve(
    model: ModelOptions,
    decoding: ServiceDecodingOptions,
    batch_size: BatchSize = 32,
    language: Language = None,
    host: Annotated[str, Option("Bind address. The default accepts local connections only.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 for any free port.", least=0, most=65535)] = 8000,
    queue: Annotated[int, Option("Maximum number of queued inputs; further requests get HTTP 503.", least=1)] = 256,
    max_mb: Annotated[int, Option("Maximum size of a request, in megabytes.", least=1)] = 32,
    timeout: Annotated[int, Option("Seconds without a new token after which a request gets HTTP 503.", least=1)] = 60,
    allow_origin: Annotated[
        list[str] | None, Option("Allowed CORS origin, or *. Repeatable.", metavar="ORIGIN")
    ] = None,
) -> int:
    """Serves a model until a signal; returns 128 plus the signal number as the exit status.

    Args:
        decoding, language: Defaults of options that a request does not set.
    Raises:
        UserError: The API key is not usable in an HTTP header, the model does not support an option, or the address is
            not available.
    """
    with paused_collection():
        from vlm.inference.predictor import load_predictor
        from vlm.serving.app import Service, make_app

    key = os.environ.get(KEY)
    if key is not None and (not key or not key.isascii() or not key.isprintable() or " " in key):
        fault = "is empty" if not key else "has white space or non-ASCII characters"
        raise UserError(f"{KEY}: {fault}; use printable ASCII characters, or unset it to serve without a key")
    policy = OriginPolicy(local=host in LOCAL_HOSTS, origins=allow_origin or ())
    predictor = model.load(load_predictor)
    unset = vars(ServiceDecodingOptions())
    defaults = {name: value for name, value in vars(decoding).items() if value != unset[name]}
    defaults |= {} if language is None else {"language": language}
    name = choose_model_name(model.checkpoint, predictor.run_name)
    service = Service(
        predictor,
        defaults,
        rows=batch_size,
        max_queued=queue,
        max_bytes=max_mb * 10**6,
        timeout=timeout,
        key=key,
        origin_policy=policy,
        name=name,
    )
    if host not in LOCAL_HOSTS and key is None:
        print_error(f"no API key: anyone who can reach {host} can use the service; set {KEY}", "warning")
    lines = [f"serving     {url}/predict" for url in reachable_urls(host)]
    if service.chat is not None:
        for option in sorted(defaults.keys() - service.chat.options.defaults.keys()):
            print_error(f"--{option.replace('_', '-')} applies only to /predict, not to conversations", "warning")
    if service.completion is not None:
        use = "complete" if service.chat is None else "chat"
        lines += [f"{use:11} {url}/v1 (model {printable(name)})" for url in reachable_urls(host)]
    lines += [f"page        {url}/" for url in reachable_urls(host)]
    return listen(
        make_app(service), host=host, port=port, lines=lines, connections=2 * queue + SPARE_CONNECTIONS, grace=GRACE
    )


def choose_model_name(checkpoint: str, run_name: str | None) -> str:
    """Returns the model name for clients: the run's name, ORG/NAME, or the name of the file or folder."""
    path = Path(checkpoint)
    if run_name and path.parent.name == "checkpoints":
        return run_name
    if checkpoint.startswith(PREFIX):
        return checkpoint.removeprefix(PREFIX)
    return path.resolve().name.removesuffix(".ckpt").removesuffix(".gguf")
