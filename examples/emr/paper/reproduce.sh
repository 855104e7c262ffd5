#!/bin/bash
# One of the paper's tables, by its folder here: examples/emr/paper/reproduce.sh gpt2-glue [OUT]
# What the head of its merge.yaml asks for comes first. Results: OUT/individual.json, OUT/emr.json and OUT/emr.png.
set -euo pipefail

recipe="$(dirname "$0")/$1"
out="${2:-paper/$1}"
evaluate=(--config "$recipe/evaluate.yaml" --all-tasks)
[ -e "$out/merged/emr.json" ] || hf-ext merge "$recipe/merge.yaml" "$out/merged"
[ -e "$recipe/evaluate.yaml" ] || { echo "$1 is merged; its head says who evaluates it."; exit 0; }
hf-ext evaluate "$recipe/merge.yaml" "${evaluate[@]}" --output "$out/individual.json"
hf-ext evaluate "$out/merged" "${evaluate[@]}" --output "$out/emr.json" --against "$out/individual.json"
