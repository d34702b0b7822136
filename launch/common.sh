# shellcheck shell=bash
# Functions shared by the launchers, which read this file with `source`.

log() { echo "${0##*/}: $*" >&2; }

die() { # MESSAGE: reports a user error, exit code 2
  log "$*; see --help"
  exit 2
}

whole_number() { # NAME=VALUE: dies unless VALUE is a whole number without leading zeros (bash reads those as octal)
  [[ ${1#*=} =~ ^(0|[1-9][0-9]*)$ ]] || die "$1 is not a whole number"
}

usage() { sed -n '2,/^[^#]/{ /^# shellcheck/d; s/^#$//p; s/^# //p; }' "$1"; } # SCRIPT: prints the comment at its top

# Whether a run that ended with this exit code is to be restarted. 0 is success, 2 a user error that would
# recur, 130 Ctrl-C. Anything else is a failed process, or 75: a checkpoint was saved because of SIGTERM.
restartable() { case $1 in 0 | 2 | 130) return 1 ;; esac }

free_port() { # prints a free port below 30000, outside the range from which systems assign ports
  local port
  while port=$((10000 + RANDOM % 20000)) && (exec 4<>"/dev/tcp/localhost/$port") 2>/dev/null; do :; done
  echo "$port"
}

flags_of() { # FILE: prints its flags on one line
  [[ -r $1 ]] || die "$1 cannot be read; the sets of compiler flags are launch/xla_flags/*.txt"
  grep -v '^#' "$1" | xargs
}

load_flags() { # VARIABLE FILE: puts its flags before those of the environment, which take precedence
  local flags
  flags=$(flags_of "$2") || exit
  export "$1=$flags ${!1:-}"
}

print_flags() { # prints what load_flags set, for a dry run
  local name
  for name in LIBTPU_INIT_ARGS XLA_FLAGS; do
    [[ -z ${!name:-} ]] || printf 'export %s=%q\n' "$name" "${!name}"
  done
}
