# shellcheck shell=bash
# What the launchers share. They read it with `source`; it does nothing by itself.

say() { echo "${0##*/}: $*" >&2; }

die() { # MESSAGE: a mistake of the user, exit code 2
  say "$*; see --help"
  exit 2
}

usage() { sed -n '2,/^[^#]/{ /^# shellcheck/d; s/^#$//p; s/^# //p; }' "$1"; } # the comment at the top of a script

# Whether a run that ended with this exit code should be started again: 0 is done, 2 a mistake that would
# come again, 130 Ctrl-C. All else is a lost process, or 75: saved because of SIGTERM.
again() { case $1 in 0 | 2 | 130) return 1 ;; esac }

free_port() { # below 30000, where no system hands out ports by itself
  local port
  while port=$((10000 + RANDOM % 20000)) && (exec 4<>"/dev/tcp/localhost/$port") 2>/dev/null; do :; done
  echo "$port"
}

flags_of() { # FILE: the flags in it, on one line
  [[ -r $1 ]] || die "$1 cannot be read; sets of compiler flags are launch/xla_flags/*.txt"
  grep -v '^#' "$1" | xargs
}

load_flags() { # FILE: puts its flags before those in the environment, which win
  local flags
  flags=$(flags_of "$1") || exit
  case ${1##*/} in
    tpu*) export LIBTPU_INIT_ARGS="$flags ${LIBTPU_INIT_ARGS:-}" ;;
    *) export XLA_FLAGS="$flags ${XLA_FLAGS:-}" ;;
  esac
}

print_flags() { # what load_flags did, for a dry run
  local name
  for name in LIBTPU_INIT_ARGS XLA_FLAGS; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done
}
