#!/usr/bin/env bash
# Run a command on a GPU machine that has torch, triton, numpy and scipy, but reaches no package registry.
#
#   scripts/offline_gpu.sh pack             here: writes carry/, the missing packages and the commit that is checked out
#   scripts/offline_gpu.sh run COMMAND...   there, in a copy of this folder with carry/: the command runs in a clean
#                                           checkout of that commit, /tmp/clean, so that its records name the commit
#
# PYTHON names the Python version of that machine; 3.12 unless set.
set -euo pipefail
cd "$(dirname "$0")/.."
clean=/tmp/clean site=/tmp/clean-site
packages=(pydantic cyclopts rich pyyaml safetensors fastapi uvicorn httptools orjson prometheus-client
          pytest pytest-xdist hypothesis)

pack() {
  mkdir -p carry
  rm -rf carry/site carry/head.git
  .venv/bin/python -m pip install --quiet --no-compile --target carry/site \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --python-version "${PYTHON:-3.12}" --only-binary=:all: --constraint constraints.txt "${packages[@]}"
  rm -rf carry/site/numpy* carry/site/scipy* carry/site/bin
  tar -cJf carry/site.tar.xz -C carry/site .
  rm -rf carry/site
  git clone --quiet --depth 1 --bare --filter=blob:none --upload-pack='git -c uploadpack.allowFilter=true upload-pack' \
    "file://$PWD" carry/head.git  # without the files: they are in the folder itself
  du -sh carry/*
}

run() {
  if [ ! -d $clean ]; then
    mkdir -p $clean $site
    tar -xJf carry/site.tar.xz -C $site
    git --git-dir carry/head.git ls-tree -r --name-only HEAD | tar -c -T - | tar -x -C $clean
    cp -r carry/head.git $clean/.git
    git -C $clean config core.bare false
    git -C $clean reset --quiet
  fi
  cd $clean
  PYTHONPATH=src:tests:$site "$@"
}

case "${1:-}" in
  pack) pack ;;
  run) shift; run "$@" ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 2 ;;
esac
