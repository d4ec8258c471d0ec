#!/usr/bin/env bash
# Runs the examples of docs/clients.md, also with LangChain and LiteLLM: benchmarks/references/clients.sh [ENVIRONMENT]
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-$HOME/.cache/vlm-references/clients}
python=${PYTHON:-python}
if [ ! -x "$environment/bin/litellm" ]; then
    "$python" -m venv "$environment"
    "$environment/bin/pip" install langchain-openai==1.7.4 litellm==1.110.2
fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
"$python" benchmarks/references/client_examples.py "$work" "$environment/bin/python" 2>"$work/errors" |
    tee benchmarks/references/clients.log
