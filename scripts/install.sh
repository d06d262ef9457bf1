#!/usr/bin/env bash
# Installs this package into a virtual environment: scripts/install.sh FOLDER EXTRA...
#
# torch comes first: the build for CUDA where there is an NVIDIA driver, else the one for CPUs, which
# is a tenth of it. Everything else has the versions and hashes of uv.lock; triton is only installed
# with the extras gpu and gpu-tests. uv does the work where it is installed, pip where it is not.
# TORCH_INDEX names another package index for torch.
set -euo pipefail
folder=$1
shift
cd "$(dirname "$0")/.."
[[ $folder == /* ]] || folder=$PWD/$folder
python=$folder/bin/python
extras=$(IFS=, && echo "$*")
torch=$(grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
pip=("$python" -m pip install --disable-pip-version-check)
uv=(uv pip install --python "$python")
if [[ ! -t 1 ]]; then  # who watches sees how far the downloads are
  pip+=(--quiet)
  uv+=(--quiet)
fi

has_nvidia() { [[ -e /proc/driver/nvidia/version ]] || nvidia-smi -L > /dev/null 2>&1; }

# The version of torch that pip would take, without a download.
offered_torch() {
  "${pip[@]}" --quiet --dry-run --no-deps --report - "$torch" 2> /dev/null |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])'
}

install_torch() {
  if "$python" -c "import sys; from importlib.metadata import version
sys.exit(version('torch').partition('+')[0] != '${torch#*==}')" 2> /dev/null; then
    return
  fi
  local index=${TORCH_INDEX:-}
  if [[ -z $index ]] && ! has_nvidia && [[ $(offered_torch || true) != *+cpu ]]; then
    index=https://download.pytorch.org/whl/cpu
  fi
  echo "installing $torch${index:+ from $index}"
  "${pip[@]}" ${index:+--index-url "$index"} "$torch"
}

"${pip[@]}" --upgrade 'pip>=23.3'
install_torch
install=("${pip[@]}")
if command -v uv > /dev/null; then
  install=("${uv[@]}")
fi
locked=$(mktemp)
trap 'rm -f "$locked"' EXIT
"$python" compose/requirements.py "$@" > "$locked"
echo "installing $(grep -c == "$locked") other packages"
"${install[@]}" --no-deps --require-hashes --requirement "$locked"
if [[ $extras == *gpu* ]]; then
  "${install[@]}" --editable ".[$extras]"
else
  # xgrammar requires triton (1 GB), which it only uses on a GPU.
  "${install[@]}" --no-deps --editable .
fi
