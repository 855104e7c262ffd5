#!/usr/bin/env bash
# The study on one thread, hours in all; the same command continues where it stopped, on another machine too.
#   examples/disentangled_dit/reproduce.sh DATA [WORK [CLAIM...]]
# DATA: folder with cifar10 (train.parquet, test.parquet) and bsds500/train, bsds500/test with photographs.
# Needs matplotlib for the curves (pip install -e ".[plots]").
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,5p' "$0" >&2
    exit 2
fi
work=$(realpath -m "${2:-runs/dit-study}")
mkdir -p "$work"
export HF_HOME="$work/hf-home" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python}" "$(dirname "$0")/study.py" "$1" "$work" "${@:3}"
