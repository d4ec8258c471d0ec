"""Composes and checks a config before torch and Lightning are imported, which takes seconds."""

import os
import pickle
import sys
from collections.abc import Callable

from vlm.config.standins import LibraryNeeded, install
from vlm.config.tree import Config
from vlm.errors import UserError

UNSURE = ("cannot be imported", "needs the package")  # in faults that stand-ins may cause


def compose_early(compose: Callable[[], Config]) -> Config | None:
    """Composes a config in a forked process in which stand-ins replace torch, Lightning and numpy.

    Args:
        compose: Composes and checks the config.
    Returns:
        The config, to be checked once more with the real libraries; None if the process needs them, they are imported
        already, or the machine has no fork. Then the caller composes it.
    Raises:
        UserError: As `compose` raises it.
    """
    if "torch" in sys.modules or not hasattr(os, "fork"):
        return None
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(source)
        _run(compose, sink)
    os.close(sink)
    with os.fdopen(source, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    config, fault = pickle.loads(data) if data else (None, None)
    if fault is not None:
        raise UserError(*fault)
    return config


def _run(compose: Callable[[], Config], sink: int) -> None:
    """Writes the config or its fault, or nothing if stand-ins do not suffice, and ends the process."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.__stdout__.fileno() if sys.__stdout__ else 1)
        os.dup2(null, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        install()
        found: tuple[Config | None, tuple[str, int] | None]
        try:
            found = compose(), None
        except UserError as fault:
            found = None, (str(fault), fault.status)
            if any(words in str(fault) for words in UNSURE):
                return
        data = pickle.dumps(found)
        with os.fdopen(sink, "wb") as pipe:
            pipe.write(data)
    except (Exception, LibraryNeeded, KeyboardInterrupt, SystemExit):
        pass  # the caller composes the config itself, and meets the same exception if it is a real one
    finally:
        os._exit(0)
