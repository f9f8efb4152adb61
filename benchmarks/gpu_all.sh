#!/usr/bin/env bash
# Everything that needs a GPU, in one go: native tests, kernels, time to first token and decoding, and whether the
# figures keep to their bounds. The packages are taken from this checkout; what they need is looked for first. Nothing
# is fetched from anywhere. A step that fails is told at the end and does not keep the next from running.
# Writes to $OUT, or to benchmarks/results without it; a toy's figures are no results and go to a temporary folder.
#
#   benchmarks/gpu_all.sh [--toy | --bounds] [STEP...]
#
# --toy: small sizes on any machine, and no native tests. --bounds: only the sizes that have a bound, 32K tokens, which
# fit into a short lease. Steps are test_gpu, kernels_gpu, ttft_gpu and bounds_gpu; without any named, all run. The
# three long ones have 8, 9 and 6 minutes, after which they are ended. Measurements begin with the sizes that have a
# bound, begin no other when their time is nearly up, and write what they have after every size: a step that is cut off
# has not run for nothing. Without limits: UNLIMITED=1.
set -uo pipefail
cd "$(dirname "$0")/.."
toy=() kernel_sizes=() ttft_sizes=()
case "${1:-}" in
--toy) toy=(--toy) && shift ;;
--bounds) kernel_sizes=(--contexts 32768 --batches 1) ttft_sizes=(--lengths 32768) && shift ;;
esac
wanted=" $* "
for name in "$@"; do
  [[ " test_gpu kernels_gpu ttft_gpu bounds_gpu " == *" $name "* ]] || { echo "no step $name" >&2 && exit 2; }
done
if [[ ${#toy[@]} -gt 0 && "$wanted" == *" test_gpu "* ]]; then
  echo "a toy has no test_gpu: native tests need a GPU" >&2
  exit 2
fi
out="${OUT:-benchmarks/results}"
[[ ${#toy[@]} -gt 0 ]] && out="${OUT:-$(mktemp -d)}"
python="${PYTHON:-python3}"
export PYTHONPATH="$PWD/src:$PWD/kernels:$PWD/integrations${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1
mkdir -p "$out"
failed=()

"$python" - <<'CHECK' || exit 2
import importlib.util
import sys

needed = "torch triton transformers tokenizers accelerate safetensors numpy xxhash filelock rich matplotlib"
missing = [name for name in f"{needed} pytest pytest_timeout hypothesis".split() if not importlib.util.find_spec(name)]
sys.exit(f"install these first: {', '.join(missing)}" if missing else 0)
CHECK
# Only to find the user's cache folder, which nothing here has to outlive.
"$python" -c 'import platformdirs' 2>/dev/null || export FUSED_KV_CACHE="${FUSED_KV_CACHE:-$(mktemp -d)}"

step() { # NAME MINUTES COMMAND...: the command's output is shown and kept
  local name="$1" limit=(timeout --kill-after=10 "${2}m")
  [[ "$wanted" == "  " || "$wanted" == *" $name "* ]] || return 0
  [[ -n "${UNLIMITED:-}" ]] && limit=()
  shift 2
  "${limit[@]}" "$@" 2>&1 | tee "$out/$name.log" || failed+=("$name")
}

budget() { # MINUTES: after which a measurement begins no size
  [[ -n "${UNLIMITED:-}" ]] || echo "--minutes $1"
}

if [[ ${#toy[@]} -eq 0 ]]; then
  # Compiling takes longer than running: several processes, where pytest can.
  parallel=$("$python" -c 'import xdist; print("-n 8 --dist loadfile")' 2>/dev/null)
  # shellcheck disable=SC2086
  step test_gpu 8 "$python" -m pytest -m gpu $parallel tests/kernels
fi
# shellcheck disable=SC2046
step kernels_gpu 9 "$python" benchmarks/kernels.py "${toy[@]}" "${kernel_sizes[@]}" $(budget 7) --out "$out/kernels_gpu"
# shellcheck disable=SC2046
step ttft_gpu 6 "$python" benchmarks/ttft_gpu.py "${toy[@]}" "${ttft_sizes[@]}" $(budget 4) --out "$out/ttft_gpu"
step bounds_gpu 1 "$python" benchmarks/gpu_bounds.py "${toy[@]}" "$out"
echo "written to $out"
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
