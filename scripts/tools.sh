#!/usr/bin/env bash
# What the tests need of the system: a C compiler, and bubblewrap. Fetched with apt-get where that
# is possible without asking anybody; else named, and the tests that need it say so themselves.
set -euo pipefail

missing=()
command -v cc >/dev/null 2>&1 || missing+=(gcc libc6-dev)
command -v bwrap >/dev/null 2>&1 || missing+=(bubblewrap)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "tools: installing ${missing[*]}" >&2
  export DEBIAN_FRONTEND=noninteractive
  apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >/dev/null 2>&1 ||
    { apt-get update --quiet >/dev/null && apt-get install --yes --quiet --no-install-recommends "${missing[@]}" >/dev/null; } ||
    echo "tools: could not install ${missing[*]}" >&2
else
  echo "tools: not on this machine: ${missing[*]} (apt-get install ${missing[*]})" >&2
fi
