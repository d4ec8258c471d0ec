"""Processes that read samples for training."""

import signal


def leave_signals_to_owner(worker: int) -> None:
    """Keeps a worker alive when a terminal or a cluster signals all processes of a run: its owner still has a step to
    finish, and ends the workers itself.

    Args:
        worker: Its number.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # The owner, too, ends a worker that hangs by this signal: the second one counts.
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.signal(signum, signal.SIG_DFL))
