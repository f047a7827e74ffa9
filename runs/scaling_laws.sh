#!/usr/bin/env bash
# Which size is best for a budget? Trains models of several depths for each of several budgets of FLOPs, with as many
# tokens as the budget allows (FLOPs = 6 x weights x tokens), then fits best sizes and exponents (runs/lib/scaling_plot.py).
#
#     bash runs/scaling_laws.sh                                   4 budgets x 5 depths on all GPUs of this machine
#     BUDGETS="1e17 3e17" DEPTHS="4 6 8" OUT=out/mine bash runs/scaling_laws.sh      another series
#
# Flags go to train_medium.py. Stopped series continue, and finished runs are skipped.
# Needs a dataset with 9.6 billion training tokens (depth 8 at 2.4e18 FLOPs); --set max_epochs=2 halves that.
# Expected, computed and not measured: 2.3e19 FLOPs; on 8 H200s at 4e15 FLOP/s 1.6 hours, 12.5 device hours, 38 USD at 3
# USD an hour. The results are in $OUT/results.csv and $OUT/scaling.png.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source runs/lib/setup.sh
setup requirements.txt
source runs/lib/launch.sh
out=${OUT:-out/scaling_laws}

for budget in ${BUDGETS:-3e17 6e17 1.2e18 2.4e18}; do
  # One line "depth tokens" for each depth: FLOPs / 6 / weights, where the script counts the weights with the
  # vocabulary of the dataset.
  plan=$(python - "$budget" "${DEPTHS:-8 10 12 14 16}" "$@" <<'EOF'
import dataclasses
import sys

import train_medium as script

try:
    for depth in sys.argv[2].split():
        flags = ["--set", f"num_layers={depth}", *sys.argv[3:]]
        config = script.make_config(script.build_parser().parse_args(flags))
        vocab_size = script.Dataset.open(config.data).tokenizer.vocab_size
        weights = script.matmul_weights(dataclasses.replace(config, vocab_size=vocab_size))
        print(depth, round(float(sys.argv[1]) / 6 / weights))
except script.UserError as error:
    sys.exit(f"error: {error}")
EOF
  )
  while read -r depth tokens; do
    train train_medium.py "$out/flops_${budget}_depth_$(printf %02d "$depth")" \
      --set "num_layers=$depth" --eval-every 0 "$@" --tokens "$tokens" </dev/null
  done <<<"$plan"
done
python runs/lib/scaling_plot.py "$out"
