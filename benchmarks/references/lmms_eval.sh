#!/usr/bin/env bash
# Compares lmms-eval on `vlm serve` with `vlm evaluate`, on 20 images: benchmarks/references/lmms_eval.sh [ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-$HOME/.cache/vlm-references/lmms_eval}
python=${PYTHON:-python}
if [ ! -x "$environment/bin/lmms_eval" ] && [ ! -x "$environment/bin/lmms-eval" ]; then
    "$python" -m venv "$environment"
    "$environment/bin/pip" install lmms-eval==0.7.3
    "$environment/bin/pip" install filelock==3.18.0 # lmms-eval imports a module that later versions lack
fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
"$python" benchmarks/references/image_harness.py "$work" "$environment/bin/python" 2>"$work/errors" |
    tee benchmarks/references/lmms_eval.log
