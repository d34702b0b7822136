#!/usr/bin/env bash
# isa.sh [PYTEST_ARGUMENT...]: runs the numeric tests as on other CPUs: with older instruction sets, on one
# core, and with matmuls in one thread. The exit code is the number of variants in which a test failed.
cd "$(dirname "$0")/.." || exit 2
tests=(tests/{numerics,precision,optim,nn,core,parallel,families})
python=${PYTHON:-.venv/bin/python}
failed=0

run() { # VARIANT XLA_FLAG COMMAND...
  echo "== $1"
  local flag=$2
  shift 2
  XLA_FLAGS=$flag "$@" "$python" -m pytest -q -n 0 "${tests[@]}" "${arguments[@]}" || ((failed += 1))
}

arguments=("$@")
for isa in SSE4_2 AVX2 AVX512; do
  run "$isa" "--xla_cpu_max_isa=$isa" env
done
run "one core" "" taskset -c 0
run "one thread for a matmul" "--xla_cpu_multi_thread_eigen=false" env
exit "$failed"
