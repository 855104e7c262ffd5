#!/usr/bin/env bash
# The whole study on one thread, about three hours (an estimate; see README.md); the same command continues where it stopped.
#   examples/mrconv/reproduce.sh FSDD CIFAR10 [WORK]
# FSDD: folder with {digit}_{speaker}_{n}.wav. CIFAR10: folder with train.parquet and test.parquet (image, label).
# MRCONV_BUDGET_SCALE=0.01 tries the machinery in a few minutes; README.md is then left as it is.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,5p' "$0" >&2
    exit 2
fi
work=$(realpath -m "${3:-runs/mrconv-study}")
mkdir -p "$work"
export HF_HOME="$work/hf-home" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python}" "$(dirname "$0")/study.py" "$1" "$2" "$work"
