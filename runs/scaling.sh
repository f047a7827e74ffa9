#!/usr/bin/env bash
# Trains train_medium.py in several sizes, then writes a table, fits and a plot (runs/lib/scaling_plot.py).
#
#     bash runs/scaling.sh miniseries      depths 8 to 20, each with the tokens, batch and learning rates that
#                                          train_medium.py derives from its depth (8 tokens per weight): bits per byte
#                                          over FLOPs
#     bash runs/scaling.sh laws            the best size for a budget: for each of 4 budgets of FLOPs 5 depths, with as
#                                          many tokens as the budget allows (FLOPs = 6 x weights x tokens)
#     BUDGETS="1e17 3e17" DEPTHS="4 6 8" OUT=out/mine bash runs/scaling.sh laws [FLAGS]       another series
#
# Flags go to train_medium.py. An interrupted series continues, and finished runs are skipped. The results are in
# $OUT/results.csv and $OUT/scaling.png. The runs that need most text come first. Computed, not measured, for 8 H200s at
# 4e15 FLOP/s and 3 USD per GPU hour:
#
#     miniseries   3.5 billion training tokens, 80 files of climbmix; 1.9e19 FLOPs; 1.3 hours, 11 GPU hours, 32 USD
#     laws         9.5 billion training tokens (depth 8 at 2.4e18 FLOPs), or half with --max-epochs 2, 140 files; 2.3e19
#                  FLOPs; 1.6 hours, 12.5 GPU hours, 38 USD
set -euo pipefail
# shellcheck source=runs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
series=${1:-}
if [[ $series != miniseries && $series != laws ]]; then
  echo "error: choose a series: bash runs/scaling.sh miniseries, or laws" >&2
  exit 2
fi
shift
if [[ " $*" != *" --data"* && " $*" != *" @"* && ! -f data/shards/climbmix/dataset.json ]]; then
  echo "error: no dataset at data/shards/climbmix; name one with --data, or make one with python data/pretrain.py" \
    "--source climbmix --max-files 140 --out data/shards/climbmix (laws also needs --max-epochs 2 then)" >&2
  exit 1
fi
source runs/lib/setup.sh
setup requirements.txt
source runs/lib/launch.sh
out=${OUT:-out/$series}

if [[ $series == miniseries ]]; then
  for depth in ${DEPTHS:-20 18 16 14 12 10 8}; do
    train train_medium.py "$out/depth_$(printf %02d "$depth")" --num-layers "$depth" --eval-every 0 "$@"
  done
else
  for budget in ${BUDGETS:-2.4e18 1.2e18 6e17 3e17}; do
    plan=$(python runs/lib/scaling_plan.py "$budget" "${DEPTHS:-8 10 12 14 16}" "$@")
    while read -r depth tokens; do
      train train_medium.py "$out/flops_${budget}_depth_$(printf %02d "$depth")" \
        --num-layers "$depth" --eval-every 0 "$@" --tokens "$tokens" </dev/null
    done <<<"$plan"
  done
fi
python runs/lib/scaling_plot.py "$out"
