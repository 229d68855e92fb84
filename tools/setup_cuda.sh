#!/bin/sh
# Installs what `make cuda` needs and is missing: a CUDA torch in the virtual environment $1, and
# nvcc where the machine has none. A GPU is not needed. Leaves $1/cuda.env, which names nvcc.
set -eu

venv=${1:-.venv-cuda}
python=${PYTHON:-python3}
torch=2.11.0

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

has_torch() {
  "$venv/bin/python" -c "
import importlib.metadata as m, sys
sys.exit(not m.version('torch').startswith('$torch'))" 2>/dev/null
}
has_torch || {
  echo "== set-up: torch $torch with CUDA into $venv (a few minutes and 5 GB the first time)"
  pip install "torch==$torch"
}
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
[ -e "$site/torch/lib/libtorch_cuda.so" ] || {
  echo "The torch $torch that pip finds for this machine is without CUDA." >&2
  exit 1
}

find_nvcc() {
  for nvcc in "${CUDACXX:-}" "$(command -v nvcc || true)" /usr/local/cuda/bin/nvcc \
    "$site"/nvidia/cu13/bin/nvcc; do
    [ -n "$nvcc" ] && [ -x "$nvcc" ] && echo "$nvcc" && return
  done
  return 1
}
find_nvcc >/dev/null || {
  echo "== set-up: nvcc into $venv"
  pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' \
    'nvidia-cuda-cccl==13.0.*'
}
nvcc=$(find_nvcc) || {
  echo "make cuda needs nvcc 13.0, and pip did not bring it. Install NVIDIA's cuda-nvcc-13-0 and" \
    "cuda-cudart-dev-13-0, or name a compiler with CUDACXX=..." >&2
  exit 1
}
echo "export CUDACXX='$nvcc'" >"$venv/cuda.env"
