#!/usr/bin/env bash
# Makes a virtual environment: scripts/make_venv.sh FOLDER [PYTHON]
#
# PYTHON is checked before anything is fetched. Without it an environment that works is kept, and a
# new one takes the first interpreter that is supported. FOLDER/.python is touched when the
# environment was made, so that make knows what to install again.
set -euo pipefail
folder=$1 wanted=${2:-}
supported="Python 3.11, 3.12 or 3.13"

# Prints why an interpreter cannot be used; a pyenv shim may exist and fail.
problem_of() {
  if ! command -v "$1" > /dev/null; then
    echo "not found"
  elif ! "$1" -c 'import sys' > /dev/null 2>&1; then
    echo "found, but it does not run"
  elif ! "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'; then
    "$1" -c 'import sys; print("Python %d.%d is not supported" % sys.version_info[:2])'
  elif ! "$1" -c 'import ensurepip, ssl, venv' > /dev/null 2>&1; then
    echo "it lacks ensurepip, ssl or venv (Debian and Ubuntu: apt install python3-venv)"
  fi
}

# What tells two installations of Python apart, also from inside a virtual environment of them.
identity_of() { "$1" -c 'import sys; print(sys.base_prefix, *sys.version_info[:3])'; }

present=$folder/bin/python
if [[ -x $present && -z $(problem_of "$present") ]]; then
  if [[ -z $wanted || $(identity_of "$wanted" 2> /dev/null) == "$(identity_of "$present")" ]]; then
    [[ -e $folder/.python ]] || identity_of "$present" > "$folder/.python"
    exit
  fi
fi

candidates=(python3.11 python3.12 python3.13 python3)
[[ -z $wanted ]] || candidates=("$wanted")
reasons=""
for candidate in "${candidates[@]}"; do
  problem=$(problem_of "$candidate")
  if [[ -z $problem ]]; then
    "$candidate" -m venv --clear "$folder"
    identity_of "$candidate" > "$folder/.python"
    exit
  fi
  reasons+=$'\n'"  $candidate: $problem"
done
echo "TokenMesh needs $supported:$reasons" >&2
echo "Name an interpreter with: make install PYTHON=/path/to/python3.12" >&2
exit 1
