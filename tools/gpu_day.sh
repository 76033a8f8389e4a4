#!/usr/bin/env bash
# Ten minutes of a machine with one or two GPUs, in one command:
#
#     bash tools/gpu_day.sh [FOLDER]
#
# It needs Python with torch, pytest, hypothesis and numpy (rich for the benchmarks), and installs nothing. In FOLDER
# (gpu-day if none is named) it leaves a file of JUnit for each group of tests, what each step printed, and page.md.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m tools.gpu_day "$@"
