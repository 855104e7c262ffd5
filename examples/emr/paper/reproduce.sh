#!/bin/bash
# One of the paper's tables, by its folder here: examples/emr/paper/reproduce.sh gpt2-glue [OUT]
# What the head of its merge.yaml asks for comes first. Results: OUT/individual.json, OUT/emr.json and OUT/emr.png.
set -euo pipefail

recipe="$(dirname "$0")/$1"
out="${2:-paper/$1}"
score="$(dirname "$0")/score.py"
[ -e "$out/merged/emr.json" ] || hf-ext merge "$recipe/merge.yaml" "$out/merged"
[ -e "$recipe/evaluate.yaml" ] || { echo "$1 is merged; its head says who evaluates it."; exit 0; }
python "$score" "$recipe/merge.yaml" "$recipe/evaluate.yaml" "$out/individual.json"
python "$score" "$out/merged" "$recipe/evaluate.yaml" "$out/emr.json" --against "$out/individual.json"
