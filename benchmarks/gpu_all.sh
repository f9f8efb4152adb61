#!/usr/bin/env bash
# Everything that needs a GPU, in one go: native tests, kernels, time to first token. Needs torch, triton, transformers,
# tokenizers, pytest, hypothesis, matplotlib and rich; the packages are taken from this checkout.
# Writes to $OUT, or to benchmarks/results without it; a toy's figures are no results and go to a temporary folder.
#
#   benchmarks/gpu_all.sh [--toy]      with --toy: small sizes on any machine, and no native tests
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results}"
[[ "${1:-}" == "--toy" ]] && out="${OUT:-$(mktemp -d)}"
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD/kernels:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
if [[ "${1:-}" != "--toy" ]]; then
  "$python" -m pytest -m gpu tests/kernels 2>&1 | tee "$out/test_gpu.log"
fi
"$python" benchmarks/kernels.py "$@" --out "$out/kernels_gpu" 2>&1 | tee "$out/kernels_gpu.log"
"$python" benchmarks/ttft_gpu.py "$@" --out "$out/ttft_gpu" 2>&1 | tee "$out/ttft_gpu.log"
