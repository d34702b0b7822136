#!/usr/bin/env bash
# Trains on all hosts of a TPU slice (Cloud TPU VMs), through gcloud.
#
#   launch/tpu_pod.sh install NAME --zone=ZONE [--project=PROJECT]     installs this commit and its dependencies on every host
#   launch/tpu_pod.sh run NAME --zone=ZONE [--restarts=R] [--xla_flags=FILE] -- --config=... --workdir=/mnt/shared/run
#   launch/tpu_pod.sh log NAME --zone=ZONE                             follows the output of host 0
#   launch/tpu_pod.sh stop NAME --zone=ZONE                            all hosts save and exit
#
# `run` returns when all hosts have started. Each host then supervises its own process and restarts it, up to R
# times (default 10), when it fails or has saved because of SIGTERM. A failed process ends the others after
# MAXLP_HEARTBEAT_TIMEOUT seconds (default 100); at a restart they wait for each other MAXLP_INIT_TIMEOUT
# seconds (default 300).
# FILE: compiler flags (default none), such as launch/xla_flags/tpu_v5p.txt. --dry_run prints the commands without running them.
# Create the slice first (gcloud compute tpus tpu-vm create). The workdir must be shared by all hosts.
cd "$(dirname "$0")/.." || exit
source launch/common.sh

action=${1:-} name=${2:-} restarts=10 dry_run='' gcloud=()
case $action in
  install | run | log | stop) ;;
  --help) usage launch/tpu_pod.sh && exit ;;
  *) die "'$action' is not one of install, run, log, stop" ;;
esac
if [[ $name != [a-z]* ]]; then die "$action needs the name of a TPU, which begins with a-z, not '$name'"; fi
shift 2
while (($#)) && [[ $1 != -- ]]; do
  case $1 in
    --zone=* | --project=*) gcloud+=("$1") ;;
    --restarts=*) restarts=${1#*=} && whole_number "$1" ;;
    --xla_flags=*) load_flags LIBTPU_INIT_ARGS "${1#*=}" ;;
    --dry_run) dry_run=1 ;;
    *) die "$1 is not a known option" ;;
  esac
  shift
done
if [[ $1 == -- ]]; then shift; fi

run_or_print() { if [[ -n $dry_run ]]; then printf '%q ' "$@" && echo; else "$@"; fi; }
on_hosts() { # all|0 COMMAND
  run_or_print gcloud compute tpus tpu-vm ssh "$name" "${gcloud[@]}" --worker="$1" --command="$2"
}

launcher='-F run.pid -f local_multiprocess.sh' # for pgrep: the number in run.pid may belong to another process by now
case $action in
  install)
    archive=$(mktemp "${TMPDIR:-/tmp}/maxlp.XXXXXX")
    trap 'rm -f "$archive"' EXIT
    run_or_print git archive --format=tar.gz --output="$archive" HEAD &&
      run_or_print gcloud compute tpus tpu-vm scp "$archive" "$name:maxlp.tar.gz" "${gcloud[@]}" --worker=all &&
      on_hosts all 'mkdir -p maxlp && tar xzf maxlp.tar.gz -C maxlp && cd maxlp && python3 -m venv .venv &&
        .venv/bin/pip install -q -e ".[tpu]"'
    ;;
  run)
    if (($# == 0)); then die "run needs -- --config=... --workdir=..."; fi
    settings=''
    for variable in LIBTPU_INIT_ARGS "${!MAXLP_@}"; do
      if [[ -n ${!variable:-} ]]; then settings+="export $variable=$(printf %q "${!variable}"); "; fi
    done
    refusal="error: a run is in progress; stop it first: launch/tpu_pod.sh stop $name ${gcloud[*]}"
    on_hosts all "cd maxlp || exit; if pgrep $launcher &>/dev/null; then echo $(printf %q "$refusal") >&2; exit 2; fi; \
      ${settings}nohup launch/local_multiprocess.sh 1 --restarts=$restarts -- \
      .venv/bin/python -m maxlp.train $(printf '%q ' "$@") >run.log 2>&1 </dev/null & echo \$! >run.pid"
    ;;
  log) on_hosts 0 'tail -n 50 -F maxlp/run.log' ;;
  stop) on_hosts all "cd maxlp && pkill -TERM $launcher" ;;
esac
