#!/usr/bin/env bash
# Every check of the project: lint, types, import contracts, tests. Stops at the first that fails.
#
#   scripts/check.sh          all of it
#   scripts/check.sh lint     without the tests
#   scripts/check.sh quick    without the tests that start vLLM and those marked `thorough`, and with fewer random examples
#   scripts/check.sh soak     only what takes hours: mixed load, starts, kills, changed configurations, tuning
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"
# Nothing is fetched while testing.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1
# Every module and test is compiled to bytecode once, not by each of the hundreds of processes that the tests start.
unset PYTHONDONTWRITEBYTECODE

what="${1:-all}"
case "$what" in all | lint | quick | soak) ;; *) echo "check: got '$what', expected lint, quick, soak or nothing" >&2; exit 2 ;; esac

step() { printf '\n== %s\n' "$*"; "$@"; }

# A test that waits for processes can fail because of what runs beside it. Up to three failed tests are run again with
# nothing beside them: the output names them, and one that fails again fails the check. More than three, or a crashed
# worker, is no matter of waiting.
tested() {
  local report=build/tests.xml code=0
  step pytest -q --junitxml "$report" "$@" || code=$?
  [ "$code" = 1 ] || return "$code"
  if grep -q "crashed while running" "$report" || [ "$(grep -oE '<(failure|error) ' "$report" | wc -l)" -gt 3 ]; then
    return 1
  fi
  printf '\ncheck: failed beside others, so run again alone:\n'
  step pytest -v "$@" -n 0 --last-failed --last-failed-no-failures none
}

[ "$what" = soak ] && { step pytest -s -n 0 -m soak; exit; }
# Beside the lint, one step after the other: the first reading of the tests writes their bytecode, with pytest's own
# assertions, 11 s of processor time that each test worker would take. What cannot be read is told by the tests.
reading=""
if [ "$what" != lint ]; then
  pytest -q --collect-only >/dev/null 2>&1 &
  reading=$!
  trap 'kill "$reading" 2>/dev/null || true' EXIT
fi
step ruff check .
step ruff format --check .
step clang-format --dry-run --Werror csrc/{bindings,cpu,cpu/simd,include/moeopt,launch}/*.* tests/unit/ops/emulation/*
step lint-imports
step pyrefly check
[ "$what" = lint ] && exit 0
wait "$reading" || true
trap - EXIT
# The tests that start vLLM run after the others, whose time limits the servers' start-up would break. Four workers for
# the two cores of a small CI machine: others use the seconds in which one waits for its processes (three took 224 s
# where four took 201 s). A worker that is done takes tests from another: else those of the launcher, which wait most,
# are the last of one worker alone.
# The quick check leaves out what is slow and rarely breaks, and says so.
selected=(--hypothesis-profile same)
[ "$what" = quick ] && selected=(-m "not thorough" --hypothesis-profile quick)
tested -n "${PYTEST_WORKERS:-4}" --dist worksteal --ignore tests/vllm "${selected[@]}"
if [ "$what" = quick ]; then
  printf '\ncheck: quick left out tests/vllm, the tests marked "thorough" and random examples (tests/examples.py); %s\n' \
    "scripts/check.sh runs all"
  exit 0
fi
# A fourth would have a fourth server up beside those of three.
tested -n "${PYTEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "${selected[@]}" tests/vllm
