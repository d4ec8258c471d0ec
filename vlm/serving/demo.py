"""`vlm demo`: a page to try a model. Gradio is imported only when it runs."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from vlm.errors import UserError, print_error
from vlm.inference.options import ModelOptions, Option
from vlm.serving.server import LOCAL, listen, urls

GRACE = 5  # seconds after a signal in which pages requested before it are still sent
SPARE = 64  # connections in addition to those whose requests may wait; each page holds two
MEGABYTE = 10**6


def demo(
    model: ModelOptions,
    host: Annotated[str, Option("Bind address. The default accepts local connections only.")] = "127.0.0.1",
    port: Annotated[int, Option("Port to listen on; 0 for any free port.", least=0, most=65535)] = 7860,
    queue: Annotated[int, Option("Maximum number of queued requests; further ones are refused.", least=1)] = 16,
    max_mb: Annotated[int, Option("Maximum size of a photo, in megabytes.", least=1)] = 16,
    rate: Annotated[int, Option("Maximum number of requests per client and minute.", least=1)] = 120,
) -> int:
    """Shows the page of a model until a signal; returns 128 and its number as the exit status.

    Raises:
        UserError: The extra is not installed, or the address cannot be had.
    """
    with TemporaryDirectory(prefix="vlm-demo-") as folder:
        # Gradio then sends no reports, and its folder stays empty.
        os.environ.update({"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": folder})
        app = make_app(model, local=host in LOCAL, queue=queue, max_bytes=max_mb * MEGABYTE, rate=rate)
        if host not in LOCAL:
            remedy = "a proxy before it can ask for a password"
            print_error(f"whoever reaches {host} may use the model; {remedy}", "warning")
        lines = [f"page        {url}" for url in urls(host)]
        options: Any = {"connections": 2 * queue + SPARE, "grace": GRACE, "ending": app.end}
        return listen(app, host=host, port=port, lines=lines, **options)


def make_app(model: ModelOptions, *, local: bool, queue: int, max_bytes: int, rate: int) -> Any:
    """Builds the page of a model as an ASGI application; arguments as in `Guard`, but max_bytes is a photo's.

    Raises:
        UserError: The extra is not installed.
    """
    try:
        from vlm.serving.demo_chat import chat_of
        from vlm.serving.demo_guard import Guard
        from vlm.serving.demo_page import Page, mounted
    except ModuleNotFoundError as fault:
        raise UserError(f'vlm demo: needs {fault.name}; pip install "vlm-lightning[demo]"') from fault
    from vlm.inference.predictor import load_predictor
    from vlm.serving.demo_examples import samples_of
    from vlm.serving.demo_uses import form_of

    predictor = model.load(load_predictor)
    predictor.prepack(1)
    path, form = Path(model.checkpoint), form_of(predictor)
    samples = samples_of(path)
    name = path.name if path.is_dir() else f"{samples.parent.name}/{path.name}"  # without paths of this machine
    sizes: Any = {"samples": samples, "max_bytes": max_bytes}
    page = Page(task=predictor.trained_task, name=name, form=form, **sizes, chat=chat_of(predictor))
    body = max_bytes * max(1, form.photos) * 4 // 3 + MEGABYTE  # photos in base64, and texts
    return Guard(mounted(page, queue=queue), local=local, max_bytes=body, rate=rate)
