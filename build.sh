#!/usr/bin/env bash
# Compiles csrc/ into moe_optimizer/ops/_kernels*.so and records what was built in build_info.json there.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash build.sh [--clean] [--arch sm_90a]

  --clean   remove earlier build results first
  --arch    CUDA architecture to build for (default sm_90a, the only one so far: the kernels use tensor core
            instructions that only Hopper has); needs nvcc >= 12.4

Environment: PYTHON (default .venv/bin/python, else python3), CXX, MAX_JOBS.
TEXT
}

fail() { # fail MESSAGE HINT [EXIT_CODE]
  printf 'build.sh: %s\n\nhint: %s\n' "$1" "$2" >&2
  exit "${3:-3}"
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
build="$root/build/kernels"
target="$root/moe_optimizer/ops"
clean=0
arch=""

while [ $# -gt 0 ]; do
  case "$1" in
    --clean) clean=1 ;;
    --arch)
      [ -n "${2:-}" ] || fail "--arch: got no value, expected such as sm_90a" "bash build.sh --help" 2
      arch="$2"
      shift
      ;;
    --arch=*)
      arch="${1#--arch=}"
      [ -n "$arch" ] || fail "--arch: got no value, expected such as sm_90a" "bash build.sh --help" 2
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *) fail "unknown argument '$1', expected --clean, --arch or --help" "bash build.sh --help" 2 ;;
  esac
  shift
done
if [ -n "$arch" ] && [ "$arch" != sm_90a ]; then
  [[ "$arch" =~ ^sm_[0-9]{2,3}[af]?(,sm_[0-9]{2,3}[af]?)*$ ]] ||
    fail "--arch: got '$arch', expected such as sm_90a" "bash build.sh --help" 2
  fail "--arch: got $arch, but the CUDA kernels are written for sm_90a (wgmma instructions, which no other GPU has)" \
    "without --arch the CPU kernels are built, and where nvcc is found the CUDA kernels for Hopper"
fi

# Nothing that lies in the folder this was started in is imported, such as a json.py there.
export PYTHONSAFEPATH=1

# What the build needs, each found before anything is touched.
python="${PYTHON:-}"
[ -n "$python" ] || { [ -x "$root/.venv/bin/python" ] && python="$root/.venv/bin/python"; } || python="$(command -v python3 || true)"
[ -n "$python" ] || fail "no Python interpreter found" "set PYTHON to one, or run: make setup"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python: expected Python 3.11 or newer" "set PYTHON to another interpreter"
# CMake takes a relative path for one of its build folder, finds nothing there, and builds for whatever Python it finds.
python="$("$python" -c 'import sys; print(sys.executable)')"

compiler="${CXX:-}"
for name in g++ c++ clang++; do
  [ -n "$compiler" ] || compiler="$(command -v "$name" || true)"
done
{ [ -n "$compiler" ] && command -v "$compiler" >/dev/null; } ||
  fail "no C++ compiler found (${CXX:-g++, c++, clang++})" "install g++ (Debian, Ubuntu: apt install g++), or set CXX"
compiler="$(command -v "$compiler")"
{ version="$("$compiler" --version 2>/dev/null)" && [ -n "$version" ]; } ||
  fail "$compiler: does not answer --version, as a C++ compiler would" "set CXX to another compiler"

pip_hint="run: $python -m pip install cmake ninja 'pybind11>=2.13'"
pybind11_dir="$("$python" -m pybind11 --cmakedir 2>/dev/null)" ||
  fail "pybind11 is not installed for $python" "$pip_hint"
cmake="$("$python" -c 'import cmake, os; print(os.path.join(cmake.CMAKE_BIN_DIR, "cmake"))' 2>/dev/null || command -v cmake || true)"
[ -n "$cmake" ] || fail "cmake not found, neither as a package of $python nor on PATH" "$pip_hint"
ninja="$("$python" -c 'import ninja, os; print(os.path.join(ninja.BIN_DIR, "ninja"))' 2>/dev/null || command -v ninja || true)"
[ -n "$ninja" ] || fail "ninja not found, neither as a package of $python nor on PATH" "$pip_hint"

if [ "$clean" = 1 ]; then
  rm -rf "$build"
  rm -f "$target"/_kernels*.so "$target/build_info.json"
fi

report() { # report "built" | "up to date"
  "$python" - "$target/build_info.json" "$1" "$arch" <<'PY'
import json, sys

info, state, arch = json.load(open(sys.argv[1])), sys.argv[2], sys.argv[3]
print(f"kernels {state}: moe_optimizer/ops/{info['extension']}")
print(f"  cpu   {', '.join(info['cpu_ops'])} ({', '.join(info['isa_paths'])}), {info['compiler']}")
if not info["cuda_ops"]:
    asked = f"; --arch {arch} has no effect" if arch else ""
    print(f"  cuda  none: {info['cuda_why_not']}{asked}")
else:
    print(f"  cuda  {', '.join(info['cuda_ops'])} ({', '.join(info['cuda_archs'])}), nvcc {info['nvcc']}")
    if state != "built":
        most, spills = (max(kernel[key] for kernel in info["kernels"]) for key in ("registers", "spill_bytes"))
        print(f"        {len(info['kernels'])} kernels of at most {most} registers, spills {spills} bytes; --clean lists them")
        sys.exit()
    print(f"        {'kernel':<44} {'registers':>9} {'shared':>7} {'spills':>7}")
    for kernel in info["kernels"]:
        print(f"        {kernel['name']:<44} {kernel['registers']:>9} {kernel['shared_bytes']:>7} {kernel['spill_bytes']:>7}")
PY
}

hash="$("$python" "$root/csrc/build_info.py" hash --compiler "$compiler" --cuda-archs "${arch:-sm_90a}")"
built="$("$python" - "$target" <<'PY'
import json, pathlib, sys, sysconfig

folder = pathlib.Path(sys.argv[1])
try:
    info = json.loads((folder / "build_info.json").read_text())
    of_this_python = info["extension"].endswith(sysconfig.get_config_var("EXT_SUFFIX"))
    print(info["source_hash"] if of_this_python and (folder / info["extension"]).is_file() else "")
except (OSError, ValueError, KeyError):
    print("")
PY
)"
if [ "$hash" = "$built" ]; then
  report "up to date"
  exit 0
fi

# One build at a time: two would write into the same folder.
mkdir -p "$build"
exec 9>"$build/.lock"
command -v flock >/dev/null && { flock -w 900 9 || fail "another build holds $build/.lock for 15 minutes" "stop it, then run again"; }

# CMake keeps what it learnt about a compiler, even about one that did not work, and forgets the other settings when it
# is given another. Of another Python it finds nothing.
cached() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt" 2>/dev/null || true; }
[ "$(cached CMAKE_CXX_COMPILER)" = "$compiler" ] && [ "$(cached Python_EXECUTABLE)" = "$python" ] ||
  rm -rf "$build/CMakeCache.txt" "$build/CMakeFiles"

log="$build/build.log"
"$cmake" -S "$root/csrc" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_MAKE_PROGRAM="$ninja" -DCMAKE_CXX_COMPILER="$compiler" \
  -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$pybind11_dir" -DMOEOPT_CUDA_ARCHS="${arch:-sm_90a}" >"$log" 2>&1 ||
  { tail -n 20 "$log" >&2; fail "cmake could not configure the kernels (log: build/kernels/build.log)" "bash build.sh --clean"; }
"$cmake" --build "$build" ${MAX_JOBS:+--parallel "$MAX_JOBS"} >>"$log" 2>&1 ||
  { tail -n 40 "$log" >&2; fail "the kernels did not compile (log: build/kernels/build.log)" "see the first error above"; }

# A process that imports meanwhile sees the old module or the new one: rename, never overwrite.
extension="$("$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["extension"])' "$build/build_info.json")"
for file in "$extension" build_info.json; do
  cp "$build/$file" "$target/.$file.tmp.$$"
  mv -f "$target/.$file.tmp.$$" "$target/$file"
done
report "built"
