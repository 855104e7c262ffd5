#!/usr/bin/env bash
# The whole study on one thread, a bit under two hours; the same command continues where it stopped.
#   examples/semanir/reproduce.sh DATA [WORK]
# DATA: folder with bsds500/train, bsds500/test, set12 and bsd68, each with images.
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,4p' "$0" >&2
    exit 2
fi
work=$(realpath -m "${2:-runs/semanir-study}")
mkdir -p "$work"
export HF_HOME="$work/hf-home" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
exec "${PYTHON:-python}" "$(dirname "$0")/study.py" "$1" "$work"
