#!/usr/bin/env bash
# Compares exported GGUF files with llama.cpp: benchmarks/references/llama_cpp.sh [FOLDER of its environment]
# The first run builds llama-cpp-python from source, which needs cmake and a compiler of C++ and takes half an hour.
set -euo pipefail
cd "$(dirname "$0")/../.."
environment=${1:-$HOME/.cache/vlm-references/llama_cpp}
python=${PYTHON:-python}
if [ ! -x "$environment/bin/python" ]; then
    "$python" -m venv "$environment"
    CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-1} "$environment/bin/pip" install \
        --no-binary llama-cpp-python llama-cpp-python==0.3.36 numpy==2.4.6
fi
work=$(mktemp -d)
trap 'rm -r "$work"' EXIT
"$python" benchmarks/references/llama_cpp_files.py prepare "$work" 2>"$work.prepare.log"
"$environment/bin/python" benchmarks/references/llama_cpp_files.py compare "$work" tests/checkpoint/files/llama_cpp.json \
    2>"$work.compare.log" | tee benchmarks/references/llama_cpp.log
rm "$work.prepare.log" "$work.compare.log"
