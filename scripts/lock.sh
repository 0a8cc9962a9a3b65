#!/usr/bin/env bash
# Resolve the CPU and dev extras in a fresh environment and pin the result in requirements-cpu.lock.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3.11}" -m venv "$scratch/venv"
pip=("$scratch/venv/bin/python" -m pip)
"${pip[@]}" install --quiet --upgrade pip
# the CPU build of torch comes first: resolved later, pip would take a CUDA build
"${pip[@]}" install --quiet "torch==2.13.0+cpu"
"${pip[@]}" install --quiet "torch==2.13.0+cpu" ".[cpu,dev]"
"${pip[@]}" uninstall --quiet --yes torchvision torchaudio torchcodec tidegate
{
    echo "# The pinned CPU set (Python 3.11, x86-64). Made by scripts/lock.sh; change pyproject.toml and run make lock."
    "${pip[@]}" freeze --exclude-editable
} >requirements-cpu.lock
