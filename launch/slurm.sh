#!/usr/bin/env bash
# Trains on the nodes of a Slurm allocation; saves and requeues itself at the time limit until it is done.
#
#   sbatch --nodes=4 launch/slurm.sh --config=configs/llama/8b.py --workdir=/shared/run
#   sbatch --nodes=4 --gpus-per-node=8 --ntasks-per-node=8 --time=12:00:00 --account=... --partition=... launch/slurm.sh ...
#   launch/slurm.sh --dry_run --config=... --workdir=...      prints the command; works without Slurm
#
# Submit it from the root of the repository; all nodes must see that directory and the workdir under the same paths.
# JAX needs one process per GPU (--ntasks-per-node), each of which sees all GPUs of its node (no --gpus-per-task).
#
# Options on the command line of sbatch override the lines below. Environment:
#   MAXLP_PYTHON      the interpreter (default .venv/bin/python, else python3)
#   MAXLP_RESTARTS    how often a run with a failed process is restarted within the allocation (default 3)
#
#SBATCH --job-name=maxlp
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=maxlp-%j.log
if [[ ${1:-} == --help ]]; then sed -n '2,/^#SBATCH/{ /^#SBATCH/d; s/^# \{0,1\}//p; }' "$0" && exit; fi
# Slurm runs a copy of this file in another directory, so its location does not lead to the repository.
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}" || exit
[[ -r launch/common.sh ]] || { echo "$PWD is not the repository: submit from its root directory" >&2 && exit 2; }
source launch/common.sh

dry_run='' restarts=${MAXLP_RESTARTS:-3}
whole_number "MAXLP_RESTARTS=$restarts"
python=${MAXLP_PYTHON:-$([[ -x .venv/bin/python ]] && echo .venv/bin/python || echo python3)}
if [[ ${1:-} == --dry_run ]]; then dry_run=1 && shift; fi
case " $*" in *" --workdir="*) ;; *) die "--workdir=DIR is needed, on a file system that all nodes share" ;; esac

# A task that fails ends the others after 30 seconds and Slurm's KillWait. --kill-on-bad-exit would end them at once,
# but also when they have saved: exit code 143 of a task that still cleans up would hide the 75 of the others.
# By default Slurm binds each task to the cores that it requested; without binding, the threads that load data can
# use all cores.
command=(srun --kill-on-bad-exit=0 --wait=30 --cpu-bind=none "$python" -m maxlp.train "$@")
if [[ -n $dry_run ]]; then
  printf '%q ' "${command[@]}" && echo
  echo "# exit code 75 (saved because of SIGTERM): scontrol requeue \$SLURM_JOB_ID; failure: up to $restarts restarts"
  exit
fi

cancelled='' # scancel signals this script too; then nothing is restarted
trap 'cancelled=1' TERM INT
for ((starts = 0; starts <= restarts; starts++)); do
  if ((starts)); then log "restart $starts of $restarts after exit code $code"; fi
  "${command[@]}"
  code=$?
  if [[ -n $cancelled ]] || ! restartable "$code"; then break; fi
  if ((code == 75)); then
    log "saved at the time limit; requeueing" && scontrol requeue "$SLURM_JOB_ID"
    break
  fi
done
exit "$code"
