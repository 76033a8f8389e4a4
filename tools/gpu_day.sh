#!/usr/bin/env bash
# One part of a day on a GPU, in at most ten minutes:
#
#     bash tools/gpu_day.sh A|B|C|D|E [FOLDER]
#
#     A   4 min    versions, streams, steps that must not wait for the device, a process group
#     B   9.5 min  all tests that need a GPU, then runs under PyTorch's stream sanitizer
#     C   9.5 min  launches per second, bytes, copies, a transformer, plans, benchmarks
#     D   9.5 min  compiled stages, allocators, a real out of memory, two ranks on one GPU, Hugging Face models
#     E   9 min    a model larger than the GPU, whose parameters are on the host
#
# It needs Python with torch, pytest, hypothesis and numpy (rich for the benchmarks), no index and no git, and installs nothing.
# FOLDER (gpu-day if none is named) gets page.md, which is written anew after each step, and log.txt, with all that was printed.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m tools.gpu_day "$@"
