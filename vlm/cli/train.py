"""The commands that train: `vlm train` and `vlm bench`. torch is imported only inside a command."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

from vlm.cli.options import Overrides
from vlm.errors import UserError
from vlm.inference.options import Option


def train(overrides: Overrides = None) -> int:
    """Only for `vlm --help`; `main` takes the command before options are parsed, since overrides are Hydra's."""
    from vlm.training.run.fit import main

    return main(overrides or [])


def bench(
    overrides: Overrides = None,
    steps: Annotated[int, Option("Optimiser steps that are timed.", least=1)] = 20,
    form: Annotated[str, Option("text or json.", ("--format",))] = "text",
    find_batch: Annotated[
        bool, Option("The largest data.batch_size that fits, by trying on a GPU.", ("--find-batch",))
    ] = False,
) -> int:
    """Time training steps of any config, as vlm train would take them; nothing is kept."""
    if form not in ("text", "json"):
        raise UserError(f"--format: {form!r} is unknown; choose text or json")
    from vlm.cli.batch_size import largest_batch
    from vlm.cli.bench import measure, text
    from vlm.config.compose import compose
    from vlm.training.config.check import check
    from vlm.training.run.faults import explain
    from vlm.training.run.train import quiet

    config = compose(overrides or [], check)
    quiet()
    try:
        with redirect_stdout(sys.stderr):  # the figures alone go to stdout
            figures = largest_batch(config) if find_batch else measure(config, steps=steps)
    except Exception as fault:
        explained = explain(fault, None)
        raise explained from (None if explained is fault else fault)
    if figures:
        print(json.dumps(figures, indent=1) if form == "json" else text(figures), flush=True)
    return 0
