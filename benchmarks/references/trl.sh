#!/usr/bin/env bash
# Compares training with TRL's SFTTrainer, DPOTrainer, CPOTrainer and GKDTrainer: benchmarks/references/trl.sh [FOLDER of its environment]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-$HOME/.cache/vlm-references/trl}
if [ ! -x "$environment/bin/python" ]; then
    "${PYTHON:-python}" -m venv "$environment"
    PIP_CONSTRAINT=constraints.txt "$environment/bin/pip" install -e ".[test]"
    "$environment/bin/pip" install trl==1.16.0
fi
"$environment/bin/python" benchmarks/references/trl_training.py 2>/dev/null | tee benchmarks/references/trl.log
"$environment/bin/python" benchmarks/references/trl_preferences.py 2>/dev/null | grep -E '^(trl|text|images) ' |
    tee benchmarks/references/trl_preferences.log
"$environment/bin/python" benchmarks/references/trl_distillation.py 2>/dev/null | grep -E '^(trl|beta) ' |
    tee benchmarks/references/trl_distillation.log
