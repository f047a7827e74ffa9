#!/usr/bin/env bash
# Trains a language model from scratch, without a GPU and without downloading data. It sets up .venv, makes a dataset
# from Python's own standard library, trains a tiny model on it (runs/cpu.args) and lets the model write some Python.
#
#     bash runs/quickstart.sh               the whole thing
#     bash runs/quickstart.sh --steps 20    a smoke test; flags go to train_small.py, and the run has its own directory
#
# Time: 5 to 9 minutes on two cores, 4 to 7 of them training, plus the first installation (250 MB to download, 1.1 GB on
# disk on Linux without a GPU). If other programs use the cores, put OMP_NUM_THREADS=1 before the command. Result:
# out/quickstart/ with report.md and curve.png, 1.13 to 1.15 bpb. After an interruption, run it again with the same
# flags: training continues. When it is finished, it shows its results again.
set -euo pipefail
# shellcheck source=runs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" --run-dir"* | *" --resume "*)
  echo "error: quickstart.sh sets --run-dir and --resume itself; leave them out to continue a run, or run python" \
    "train_small.py to choose a directory" >&2
  exit 2
  ;;
esac
source runs/lib/setup.sh
setup requirements-quickstart.txt

# -- data: about 9 MB of text, a tokenizer with 4,096 entries
python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib

# -- training
run=out/quickstart
if (($#)); then # other flags, another directory: out/quickstart_steps-20_2274045760, with a checksum of the exact flags
  run+=_$(printf '%s' "$*" | tr -cs 'A-Za-z0-9.' '-' | sed 's/^-//; s/-$//' | cut -c 1-70)
  run+=_$(printf '%s\0' "$@" | cksum | cut -d ' ' -f 1)
fi
launch=(python)
source runs/lib/launch.sh
train train_small.py "$run" @runs/cpu.args "$@"

# -- results
echo
echo "=== Python written by the model at temperature 0.9 (the samples in report.md, at 0.5, repeat themselves)"
python runs/sample.py "$run" --tokens 80 --temperature 0.9 \
  --prompt $'class Queue:\n    """' --prompt $'def read(self, size=-1):\n    """' --prompt $'class Error(Exception):\n'
echo
echo "Finished in $SECONDS s."
echo "Report:  $run/report.md"
echo "Plot:    $run/curve.png"
echo "To write more text:"
echo "  source .venv/bin/activate"
echo "  python runs/sample.py $run --prompt \"def main(\""
