"""How threads of one process wait for each other."""

import os


def sleep_while_waiting() -> None:
    """Has threads sleep while they wait, unless the environment says otherwise; to be called before torch is loaded.

    A thread that spins while it waits for one that another process keeps from running costs far more than it saves
    on a machine of one's own: see docs/scaling.md.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
