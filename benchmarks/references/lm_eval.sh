#!/usr/bin/env bash
# Compares lm-eval on `vlm serve` with its hf backend on the same folder, example by example:
# benchmarks/references/lm_eval.sh [FOLDER of its environment]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-$HOME/.cache/vlm-references/lm_eval}
python=${PYTHON:-python}
if [ ! -x "$environment/bin/lm_eval" ]; then
    "$python" -m venv "$environment"
    PIP_CONSTRAINT=constraints.txt "$environment/bin/pip" install "lm-eval[api,hf]==0.4.13" transformers torch
fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
"$python" benchmarks/references/evaluation_harness.py prepare "$work" 2>"$work.log"
"$python" benchmarks/references/evaluation_harness.py compare "$work" "$environment/bin/lm_eval" |
    tee benchmarks/references/lm_eval.log
rm "$work.log"
