#!/usr/bin/env bash
# Compares training on rewards with TRL's GRPOTrainer and RLOOTrainer, in the environment of trl.sh:
#   benchmarks/references/trl_rewards.sh [FOLDER of its environment]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-$HOME/.cache/vlm-references/trl}
"$environment/bin/python" benchmarks/references/trl_rewards.py 2>/dev/null |
    grep -E '^(trl|group|leave_one_out) ' | tee benchmarks/references/trl_rewards.log
