"""How threads of one process wait for each other."""

import os


def spin_briefly() -> None:
    """Has threads spin for a moment before they sleep, unless the environment says otherwise; call before torch loads.

    Between two operations of a step there is less than that moment, and to sleep and wake costs more: a third of a
    small model's step. A thread that spins for long, on one that another process keeps from running, costs far more
    than it saves: see docs/scaling.md.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "3000"
