#!/usr/bin/env bash
# From nothing to a trained language model, without a GPU and without a download of data: sets up .venv, makes a
# dataset from Python's own standard library, trains a tiny model on it (runs/cpu.args), compares it with gzip and xz,
# and lets it write some Python.
#
#     bash runs/quickstart.sh               the whole thing
#     bash runs/quickstart.sh --steps 20    a smoke test; flags go to train_small.py, the run gets a directory of its own
#
# Time: 5 to 9 minutes on two cores, 4 to 7 of them training. Result: out/quickstart/ with report.md and
# curve.png, about 1.16 bits per byte. Stopped runs continue, finished ones show their results at once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" --run-dir"* | *" --resume "*)
  echo "error: quickstart.sh chooses --run-dir and --resume itself; for your own, call python train_small.py" >&2
  exit 2
  ;;
esac
source runs/setup.sh
setup requirements.txt

# -- data: about 9 MB of text, a tokenizer with 4,096 entries
python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib

# -- training
run=out/quickstart
if (($#)); then # other flags, another directory: out/quickstart_steps-20
  run+=_$(printf '%s' "$*" | tr -cs 'A-Za-z0-9.' '-' | sed 's/^-//; s/-$//' | cut -c 1-80)
fi
if [[ -f $run/report.md ]]; then # written last
  echo "$run is finished already; remove it to train again"
elif compgen -G "$run/checkpoints/step_*/state.json" >/dev/null; then
  echo "$run was interrupted; it continues from its last checkpoint"
  python train_small.py --run-dir "$run" --resume
else
  if [[ -e $run ]]; then
    echo "$run has no checkpoint; it is moved to $run.unfinished"
    rm -rf "$run.unfinished"
    mv "$run" "$run.unfinished"
  fi
  python train_small.py @runs/cpu.args --run-dir "$run" "$@"
fi

# -- results
echo
echo "=== Python as the model writes it"
python "$run/train_small.py" sample --from "$run" --set sample_tokens=100 \
  --prompt "def" --prompt "import os" --prompt "class" # no space at the end: tokens begin with theirs
echo
echo "=== Validation text, model against compressors"
python runs/compressors.py "$run"
echo
echo "Everything is in $run: report.md shows the results, curve.png the loss. This took $SECONDS s."
echo "More text: python train_small.py sample --from $run --prompt \"def main(\"" \
  "(after: source .venv/bin/activate)"
