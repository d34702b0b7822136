#!/usr/bin/env bash
# Runs a command as N processes on this machine, as if each were a host; restarts all when one fails.
#
#   launch/local_multiprocess.sh N [--restarts=R] [--logs=DIR] [--xla_flags=FILE] [--dry_run] -- COMMAND...
#   launch/local_multiprocess.sh 2 --restarts=3 -- python -m maxlp.train --config=configs/llama/debug.py --workdir=/tmp/run
#
# Process 0 prints here, process I to DIR/process-I.log (default: a new directory). GPUs are divided evenly.
# With N=1 it only supervises the process, which finds other processes by itself (TPU hosts).
# When a process fails, the others are ended within 3 seconds and all restart, up to R times (default 0); exit
# code 75 (saved because of SIGTERM) restarts too. Codes 0 (done), 2 (user error) and 130 (Ctrl-C) are final.
# Ctrl-C, SIGTERM and SIGHUP end all processes, which save and exit in MAXLP_GRACE seconds (300); a second one kills.
# FILE: compiler flags, one of launch/xla_flags. --dry_run prints the commands without running them.
# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
n='' restarts=0 logs='' dry_run='' grace=${MAXLP_GRACE:-300}
gpus=$(if [[ ${CUDA_VISIBLE_DEVICES+set} ]]; then tr , '\n' <<<"$CUDA_VISIBLE_DEVICES"; else nvidia-smi -L; fi 2>/dev/null | wc -l)
whole_number "MAXLP_GRACE=$grace"
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    --help) usage "$0" && exit ;;
    --restarts=*) restarts=${1#*=} && whole_number "$1" ;;
    --logs=*) logs=${1#*=} ;;
    --xla_flags=*) load_flags "$([[ ${1##*[=/]} == tpu* ]] && echo LIBTPU_INIT_ARGS || echo XLA_FLAGS)" "${1#*=}" ;;
    --dry_run) dry_run=1 ;;
    *[!0-9]* | 0* | '') die "$1 is not a known option" ;;
    *) n=$1 ;;
  esac
  shift
done
if [[ -z $n ]] || (($# < 2)); then die "N -- COMMAND... is needed, for example 2 -- python -m maxlp.train"; fi && shift

process() { # PROCESS PORT COMMAND...: replaces this shell by the command, or prints it
  local env=()
  if ((n > 1)); then env=("MAXLP_COORDINATOR=localhost:$2" "MAXLP_NUM_PROCESSES=$n" "MAXLP_PROCESS_ID=$1"); fi
  if ((n > 1 && gpus >= n)); then env+=("JAX_LOCAL_DEVICE_IDS=$(seq -s, $(($1 * gpus / n)) $((($1 + 1) * gpus / n - 1)))"); fi
  if [[ -n $dry_run ]]; then printf '%q ' "${env[@]}" "${@:3}" && echo && return; fi
  if (($1)); then exec >>"$logs/process-$1.log" 2>&1; else exec 2>&3; fi
  exec env "${env[@]}" "${@:3}" </dev/null 3>&-
}
# shellcheck disable=SC2329
stop() { # SIGNAL: passes it on; the second one kills
  if [[ -n $stopping ]]; then grace=-1; fi
  stopping=$1 deadline=$((SECONDS + grace))
  kill "-$1" "${pids[@]}"
}
ended() { # PROCESS CODE: records the first failure, or a user error (2) that made JAX abort others (134), and the deadline
  if ((code && $2 != 130)) && [[ "$code $2" != "134 2" ]]; then return; fi
  code=$2 deadline=$((SECONDS + grace))
  if [[ -n $stopping || $2 == 75 || $2 == 130 ]]; then return; else deadline=$((SECONDS + 2)); fi
  log "process $1 of $n failed with exit code $2$( (($2 > 128)) && echo " (SIG$(kill -l "$2"))");" \
    "ending the others${logs:+; output of process I: $logs/process-I.log}" 2>&3
}

if [[ -n $dry_run ]]; then print_flags && for ((i = 0; i < n; i++)); do process "$i" PORT "$@"; done && exit; fi
if ((n > 1)); then mkdir -p "${logs:=$(mktemp -d "${TMPDIR:-/tmp}/maxlp-logs.XXXXXX")}" || exit; fi
exec 3>&2 2>/dev/null # otherwise the shell reports every process that it kills
trap 'stop INT' INT
trap 'stop TERM' TERM HUP
code=75 starts=0 stopping='' pids=()
while restartable "$code" && [[ -z $stopping ]] && ((starts <= restarts)); do
  if ((starts++)); then log "restart $((starts - 1)) of $restarts after exit code $code" 2>&3; fi
  code=0 deadline=$((2 ** 62)) port=$(free_port)
  for ((i = 0; i < n; i++)); do
    set -m # a process group each: only this script sends Ctrl-C, and child processes end with their parent
    process "$i" "$port" "$@" &
    set +m
    pids[i]=$!
  done
  while gone='' && ((${#pids[@]})); do
    for i in "${!pids[@]}"; do
      if kill -0 "${pids[i]}"; then continue; fi
      wait "${pids[i]}" || gone+="$? $i"$'\n'
      unset "pids[i]"
    done # Highest code first: of several that ended together, one was killed and the others failed without it.
    while read -r status i && [[ -n $i ]]; do ended "$i" "$status"; done < <(sort -rn <<<"$gone")
    if ((SECONDS > deadline)); then kill -KILL "${pids[@]/#/-}" && wait && pids=(); fi
    sleep 0.2
  done
done
exit "$code"
