#!/usr/bin/env bash
# Everything that needs a GPU, in one go: native tests, kernels, time to first token and decoding, and whether the
# figures keep to their bounds. Needs torch, triton, transformers, tokenizers, pytest, hypothesis, matplotlib and rich;
# the packages are taken from this checkout. A step that fails is told at the end and does not keep the next from running.
# Writes to $OUT, or to benchmarks/results without it; a toy's figures are no results and go to a temporary folder.
#
#   benchmarks/gpu_all.sh [--toy]      with --toy: small sizes on any machine, and no native tests
set -uo pipefail
cd "$(dirname "$0")/.."
toy=()
[[ "${1:-}" == "--toy" ]] && toy=(--toy)
out="${OUT:-benchmarks/results}"
[[ ${#toy[@]} -gt 0 ]] && out="${OUT:-$(mktemp -d)}"
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD/kernels:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
failed=()

step() { # NAME COMMAND...: the command's output is shown and kept
  local name="$1"
  shift
  "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

if [[ ${#toy[@]} -eq 0 ]]; then
  step test_gpu "$python" -m pytest -m gpu tests/kernels
fi
step kernels_gpu "$python" benchmarks/kernels.py "${toy[@]}" --out "$out/kernels_gpu"
step ttft_gpu "$python" benchmarks/ttft_gpu.py "${toy[@]}" --out "$out/ttft_gpu"
step bounds_gpu "$python" benchmarks/gpu_bounds.py "${toy[@]}" "$out"
echo "written to $out"
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
