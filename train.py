"""Trains a model: `python train.py [OVERRIDES]`; see README.md."""

import sys

from vlm.training.fit import main

if __name__ == "__main__":
    sys.exit(main())
