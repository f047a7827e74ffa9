#!/usr/bin/env bash
# What several GPUs of one host give: speed against one of them, the loss of the same steps, and what happens when a
# process dies or hangs. One call; tried with two processes on CPUs, without the parts `speed` and STOP:
#
#     bash dev/many_gpus.sh 8 @runs/p34.args --min-packs 8
#
# The number of processes comes first; all other arguments are flags of train_small.py. Results lie in out/many_gpus:
# a file for each part, and summary.txt, which is also printed. Environment variables:
#   PARTS    which parts to run (default "speed loss faults seeds")
#   STEPS    of the comparison of losses, and after which a process gets its signal (default 100)
#   SIGNALS  what it gets (default "KILL STOP")
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

count=$1
shift
flags=("$@")
steps=${STEPS:-100}
out=out/many_gpus
rm -rf "$out"
mkdir -p "$out"
export TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=60 # NCCL's watchdog; not tried with a process that hangs

say() { echo "$*" | tee -a "$out/summary.txt"; }
many() { torchrun --standalone --nproc_per_node="$count" "$@"; }

# Tokens a second of each stage, on one GPU and on all, for both scripts.
speed() {
  local script
  for script in train_small.py train_medium.py; do
    python dev/bench.py --script "$script" --steps 12 >"$out/${script%.py}_1.txt"
    many dev/bench.py --script "$script" --steps 12 >"$out/${script%.py}_$count.txt"
    say "$script on 1 and $count: $(grep -h '^recipe' "$out/${script%.py}"_{1,"$count"}.txt | tr '\n' ' ')"
  done
}

# The same steps on one process and on all.
loss() {
  local short=("${flags[@]}" --steps "$steps" --eval-every 0 --save-every -1 --log-every 1)
  python train_small.py "${short[@]}" --run-dir "$out/loss_1" >"$out/loss_1.txt"
  many train_small.py "${short[@]}" --run-dir "$out/loss_$count" >"$out/loss_$count.txt"
  python - "$out/loss_1" "$out/loss_$count" <<'PY' | tee -a "$out/summary.txt"
import json, sys
one, all_ = ([json.loads(line).get("loss") for line in open(f"{run}/log.jsonl")] for run in sys.argv[1:])
apart = [abs(a - b) / a for a, b in zip(one, all_) if a and b]
print(f"losses of {len(apart)} steps: at most {max(apart):.2e} apart, {sum(apart) / len(apart):.2e} in the mean")
PY
}

# A process gets a signal in the middle of a run: torchrun must end the others, and --resume must go on.
faults() {
  local signal run agent begin
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
}

# Three seeds of the whole run.
seeds() {
  local seed
  for seed in 0 1 2; do
    many train_small.py "${flags[@]}" --seed "$seed" --run-dir "$out/seed_$seed" >"$out/seed_$seed.txt" 2>&1
    say "seed $seed: $(tail -n 1 "$out/seed_$seed.txt")"
  done
}

for part in ${PARTS:-speed loss faults seeds}; do
  "$part"
done
