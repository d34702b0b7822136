#!/usr/bin/env bash
# Trains on Kubernetes as a JobSet, on TPU slices (GKE) or on hosts with GPUs.
#
#   launch/kubernetes.sh tpu NAME --image=IMAGE --type=v5p --topology=4x4x8 [--slices=2] -- --config=... --workdir=gs://bucket/run
#   launch/kubernetes.sh gpu NAME --image=IMAGE --hosts=4 [--gpus=8] -- --config=... --workdir=/data/run
#   kubectl logs -f -l jobset.sigs.k8s.io/jobset-name=NAME,batch.kubernetes.io/job-completion-index=0
#   kubectl delete jobset NAME                               all processes save and exit
#
# --restarts=R (default 10): how often a failure restarts all pods; a restart after SIGTERM does not count.
# --volume=CLAIM (gpu): a PersistentVolumeClaim that all hosts share, mounted at /data (default maxlp).
# --xla_flags=FILE: compiler flags (default on TPU: those of the type in launch/xla_flags; empty for none).
# --dry_run prints the manifest. The cluster needs JobSet (jobset.sigs.k8s.io), the image an installed maxlp.
cd "$(dirname "$0")/.." || exit
source launch/common.sh

# shellcheck disable=SC2034 # used by name in the loop at the end
kind=${1:-} name=${2:-} image='' type='' topology='' slices=1 hosts='' gpus=8 restarts=10 volume=maxlp flags='' dry_run=''
case $kind in tpu | gpu) ;; --help) usage launch/kubernetes.sh && exit ;; *) die "'$kind' is neither tpu nor gpu" ;; esac
[[ $name =~ ^[a-z][a-z0-9-]{0,39}$ ]] || die "NAME '$name' must start with a letter and have at most 40 characters from a-z, 0-9 and -"
shift 2
while (($#)) && [[ $1 != -- ]]; do
  case $kind$1 in
    tpu--hosts=* | tpu--gpus=* | tpu--volume=* | gpu--type=* | gpu--topology=* | gpu--slices=*)
      die "$1 is not an option of $kind" ;;
    *--slices=* | *--hosts=* | *--gpus=* | *--restarts=*) whole_number "$1" ;;
  esac
  case $1 in
    --slices=0 | --hosts=0 | --gpus=0) die "$1 is not a positive number" ;;
    --image=* | --type=* | --topology=* | --slices=* | --hosts=* | --gpus=* | --restarts=* | --volume=* | --xla_flags=*)
      option=${1%%=*} && printf -v "${option#--}" %s "${1#*=}" ;;
    --dry_run) dry_run=1 ;;
    *) die "$1 is not a known option" ;;
  esac
  shift
done
if [[ -z $image ]] || (($# < 2)); then die "--image=IMAGE and -- --config=... --workdir=... are needed"; fi
shift
manifest=launch/jobset_$kind.yaml
advice="pods lose their own files when they restart; use a bucket, as in gs://bucket/run"
if [[ $kind == gpu ]]; then advice+=", or a folder in /data"; fi
if [[ " $*" != *" --workdir="* ]]; then die "--workdir=FOLDER is needed: $advice"; fi # not --workdir FOLDER
for arg; do
  if [[ $arg != --workdir=* || $arg == --workdir=*://* ]]; then continue; fi
  while read -r folder; do
    if [[ ${arg#*=} == "$folder"/* ]]; then continue 2; fi
  done < <(sed -n 's/.*mountPath: *\([^ ,}]*\).*/\1/p' "$manifest")
  die "$arg is on no volume of $manifest: $advice"
done

# shellcheck disable=SC2034
if [[ $kind == tpu ]]; then
  case $type in
    v4) accelerator=tpu-v4-podslice dimensions=3 example=4x4x8 ;;
    v5e) accelerator=tpu-v5-lite-podslice dimensions=2 example=4x8 ;;
    v5p) accelerator=tpu-v5p-slice dimensions=3 example=4x4x8 ;;
    v6e) accelerator=tpu-v6e-slice dimensions=2 example=4x8 ;;
    *) die "--type=$type is unknown: use v4, v5e, v5p or v6e" ;;
  esac
  [[ x$topology =~ ^(x[1-9][0-9]*){$dimensions}$ ]] || die "--topology=$topology is not that of a slice of $type, such as $example"
  chips=$((${topology//x/*}))
  per_host=$((chips < 4 ? chips : 4)) # hosts of slices have 4 chips
  ((chips % per_host == 0)) || die "--topology=$topology has $chips chips, but hosts have 4; use another, such as $example"
  hosts=$((chips / per_host)) flags=launch/xla_flags/tpu_$type.txt
elif [[ -z $hosts ]]; then
  die "--hosts=N is needed: how many hosts of $gpus GPUs"
fi
if [[ -z ${xla_flags+set} && -r $flags ]]; then xla_flags=$flags; fi # v4 and GPUs have no set
flags=$(if [[ -n ${xla_flags-} ]]; then flags_of "$xla_flags"; fi) || exit
args=''
for arg; do
  arg=${arg//\\/\\\\} arg=${arg//$'\n'/\\n} arg=${arg//$'\t'/\\t}
  arg=${arg//\$/\$\$} # Kubernetes replaces $(NAME), and $$ by $
  args+="${args:+, }\"${arg//\"/\\\"}\""
done

manifest=$(<"$manifest")
for variable in name image accelerator topology slices hosts per_host gpus restarts volume flags args; do
  manifest=${manifest//"\${$variable}"/"${!variable}"}
done
if [[ -n $dry_run ]]; then echo "$manifest"; else kubectl apply -f - <<<"$manifest"; fi
