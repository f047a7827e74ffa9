#!/usr/bin/env bash
# Checks training on several GPUs of one host: the losses are those of one GPU, and when a process dies or hangs,
# torchrun ends the others and --resume continues. Tried with two processes on CPUs, without STOP.
#
#     bash dev/many_gpus.sh 8 @runs/p34.args --min-packs 8
#
# The number of processes comes first; all other arguments are flags of train_small.py. The output of each run lies in
# out/many_gpus, the results in its summary.txt, which is also printed. Environment variables:
#   STEPS    of the comparison of losses, and after which a process gets its signal (default 100)
#   SIGNALS  what it gets (default "KILL STOP")
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

count=${1:?usage: bash dev/many_gpus.sh PROCESSES [FLAG ...], e.g. 8 @runs/p34.args}
shift
flags=("$@")
steps=${STEPS:-100}
out=out/many_gpus
rm -rf "$out"
mkdir -p "$out"
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60 # NCCL's watchdog; not tried with a process that hangs

say() { echo "$*" | tee -a "$out/summary.txt"; }
many() { torchrun --standalone --nproc_per_node="$count" "$@"; }

short=("${flags[@]}" --steps "$steps" --eval-every 0 --save-every -1 --log-every 1)
python train_small.py "${short[@]}" --run-dir "$out/loss_1" >"$out/loss_1.txt"
many train_small.py "${short[@]}" --run-dir "$out/loss_$count" >"$out/loss_$count.txt"
python - "$out/loss_1" "$out/loss_$count" <<'PY' | tee -a "$out/summary.txt"
import json, sys
one, all_ = ([json.loads(line).get("loss") for line in open(f"{run}/log.jsonl")] for run in sys.argv[1:])
apart = [abs(a - b) / a for a, b in zip(one, all_) if a and b]
print(f"losses of {len(apart)} steps: at most {max(apart):.2e} apart, {sum(apart) / len(apart):.2e} in the mean")
PY

# One process gets a signal in the middle of a run.
for signal in ${SIGNALS:-KILL STOP}; do
  run=$out/$signal
  many train_small.py "${flags[@]}" --run-dir "$run" --save-every "$((steps / 2))" --log-every 1 >"$run.txt" 2>&1 &
  agent=$!
  until [[ -f $run/log.jsonl && $(wc -l <"$run/log.jsonl") -gt $steps ]]; do sleep 0.2; done
  begin=$SECONDS
  kill -s "$signal" "$(pgrep -f " -u train_small.py .*$run " | tail -n 1)"
  wait "$agent" || true
  say "$signal: torchrun ended all after $((SECONDS - begin)) s"
  many train_small.py --resume --run-dir "$run" >"$run.resumed.txt" 2>&1
  say "$signal, resumed: $(tail -n 1 "$run.resumed.txt")"
done
