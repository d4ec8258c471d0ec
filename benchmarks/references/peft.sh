#!/usr/bin/env bash
# Compares adapters with the peft library, in both directions: benchmarks/references/peft.sh [FOLDER of its packages]
# The first run installs peft next to the environment of vlm, whose torch and transformers it uses.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages=${1:-$HOME/.cache/vlm-references/peft}
python=${PYTHON:-python}
if [ ! -d "$packages/peft" ]; then
    "$python" -m pip install --no-deps --target "$packages" peft==0.21.2 accelerate==1.15.0
fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
PYTHONPATH="$packages" "$python" benchmarks/references/peft_adapters.py "$work" tests/checkpoint/files/peft \
    2>"$work.log" | tee benchmarks/references/peft.log
rm "$work.log"
