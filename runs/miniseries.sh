#!/usr/bin/env bash
# Trains models of several depths, each with the tokens, batch and rates that train_medium.py derives from its depth (8
# tokens a weight), then writes a table and a picture of bits per byte over FLOPs (runs/lib/scaling_plot.py).
#
#     bash runs/miniseries.sh                                     depths 8 to 20 on all GPUs of this machine
#     DEPTHS="8 12 16" OUT=out/mine bash runs/miniseries.sh       other depths; flags go to train_medium.py
#
# Needs a dataset with 3.5 billion training tokens: python data/pretrain.py --source climbmix --max-files 80 ...
# Expected, computed and not measured: 1.9e19 FLOPs for depths 8 to 20; on 8 H200s at 4e15 FLOP/s 1.3 hours, 11 device
# hours, 32 USD at 3 USD an hour. A series that was stopped continues, and finished runs are skipped. The results are in
# $OUT/results.csv and $OUT/scaling.png.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source runs/lib/setup.sh
setup requirements.txt
source runs/lib/launch.sh
out=${OUT:-out/miniseries}

for depth in ${DEPTHS:-8 10 12 14 16 18 20}; do
  train train_medium.py "$out/depth_$(printf %02d "$depth")" --set "num_layers=$depth" --eval-every 0 "$@"
done
python runs/lib/scaling_plot.py "$out"
