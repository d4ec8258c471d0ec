#!/usr/bin/env bash
# Compares vectors with sentence-transformers: benchmarks/references/sentence_transformers.sh [FOLDER of its packages]
# The first run installs it next to the environment of vlm, whose torch and transformers it uses.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages=${1:-$HOME/.cache/vlm-references/sentence_transformers}
python=${PYTHON:-python}
if [ ! -d "$packages/sentence_transformers" ]; then
    "$python" -m pip install --no-deps --target "$packages" sentence-transformers==6.2.0
fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
PYTHONPATH="$packages" "$python" benchmarks/references/sentence_vectors.py "$work" 2>"$work.log" |
    tee benchmarks/references/sentence_transformers.log
rm "$work.log"
