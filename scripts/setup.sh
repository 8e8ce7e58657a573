#!/usr/bin/env bash
# Make $VENV with everything uv.lock names. Three ways, best first: an installed uv, a uv put into
# the new environment by pip, plain pip (which resolves afresh instead of reading the lock).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv=${VENV:-.venv}

if ! command -v "$python" >/dev/null 2>&1; then
  echo "setup: no '$python' on this machine; install Python 3.11 or newer, or name one: make setup PYTHON=/path/to/python" >&2
  exit 1
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "setup: '$python' is $("$python" -V 2>&1); ekiden needs 3.11 or newer: make setup PYTHON=python3.12" >&2
  exit 1
fi

echo "setup: making $venv from uv.lock; this takes a minute the first time" >&2

sync_with() {
  # --inexact: uv itself may live in this environment and must survive its own sync.
  UV_PROJECT_ENVIRONMENT="$venv" "$1" sync --frozen --inexact --quiet --python "$2"
}

if command -v uv >/dev/null 2>&1 && uv --version >/dev/null 2>&1; then
  if sync_with uv "$python"; then exit 0; fi
  echo "setup: the installed uv did not manage; going on with pip" >&2
fi

if [ ! -x "$venv/bin/python" ]; then
  if ! "$python" -m venv "$venv"; then
    rm -rf "$venv"
    echo "setup: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
    exit 1
  fi
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  "$venv/bin/python" -m ensurepip --upgrade >/dev/null
fi

pip=("$venv/bin/python" -m pip --disable-pip-version-check --quiet)
if "${pip[@]}" install uv && sync_with "$venv/bin/uv" "$venv/bin/python"; then exit 0; fi

echo "setup: no uv to be had; installing with pip, without the lock" >&2
mapfile -t dev < <("$venv/bin/python" -c '
import tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]
print("\n".join(name for name in groups["dev"] if not name.startswith("ekiden")))')
"${pip[@]}" install --editable '.[all]' "${dev[@]}"
