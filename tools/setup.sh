#!/bin/sh
# Installs what the build needs and is missing: system packages, then the virtual environment $1. It
# sees the package in the folder $2, and has the torch of requirements-dev.txt, or version $3.
set -eu

venv=${1:-.venv}
package=${2:-python}
torch=${3:-}
python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Ligature needs Python 3.11 or newer; name one with: make PYTHON=..." >&2
  exit 1
}

has_header() { echo "#include <$1>" | g++ -E -x c++ - >/dev/null 2>&1; }

missing=""
command -v g++ >/dev/null || missing="$missing g++"
command -v ccache >/dev/null || missing="$missing ccache"
has_header gtest/gtest.h || missing="$missing libgtest-dev"
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing="$missing python3-venv"
"$python" -c '
import pathlib, sys, sysconfig
sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())' ||
  missing="$missing python3-dev"

if [ -n "$missing" ]; then
  if [ "$(id -u)" -eq 0 ]; then
    echo "== set-up: system packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $missing >/dev/null
  else
    echo "Ligature needs a few system packages. Run this, then call make again:"
    echo
    echo "  sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends$missing'"
    exit 1
  fi >&2
fi

echo "== set-up: Python packages into $venv (a few minutes the first time)"
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
sed "${torch:+s/^torch==.*/torch==$torch/}" "$root/requirements-dev.txt" >"$venv/requirements.txt"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$venv/requirements.txt"

# The package is used from the source tree, or from the build folder of another torch; the build puts
# its libraries there.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$root/$package" >"$site/ligature_source_tree.pth"

touch "$venv/.ready"
