"""Trains a model: `python train.py [OVERRIDES]`; see README.md."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while modules are imported an interrupt ends it without a traceback
    from vlm.training.run.fit import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
