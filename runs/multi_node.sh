#!/usr/bin/env bash
# Trains on several machines and goes on after one is lost. The same command on every machine; HEAD is the first one:
#
#     NODES=2 HEAD=node0:29400 bash runs/multi_node.sh --run-dir /shared/out/first @runs/h100.args
#
# Everything behind the script's name goes to train_small.py. Besides, from the environment:
#   NODES    machines, N or MIN:MAX (default 1). N waits until a lost machine is back, or another one has started this
#            command; MIN:MAX goes on with what is left, and takes in one that comes back.
#   HEAD     host:port where all meet (default localhost:29400), a machine of the run that listens there
#   GPUS     processes on each machine (default: its GPUs, else 1)
#   JOB      name of the meeting, if one machine serves several (default: the run directory)
#   RESTARTS failures that are forgiven (default 20); a machine that comes back costs none
#   RDZV     timeouts of torchrun's rendezvous, e.g. keep_alive_interval=5,join_timeout=3600
#   SCRIPT   default train_small.py
#
# Every start and restart continues from the newest complete checkpoint, so at most --save-every steps are lost (250
# unless given). --run-dir and --data must be on a file system that all machines share. The tokens of a step stay the
# same with any number of processes, which must divide the packs of every stage: 16 of the default recipe, so 16, 8, 4,
# 2 or 1 processes. The script refuses NODES=MIN:MAX if a number between does not fit: 1:2 machines with 8 GPUs do, 2:4
# with 4 GPUs do not, because three machines would have 12.
#
# HEAD itself may not be lost: torchrun keeps the list of members there. Start all again then, or let runs/slurm.sh do
# that. A machine that loses power without closing its connections is noticed when NCCL's watchdog gives up, after 10
# minutes. torchrun waits 30 s for more machines whenever it has MIN of them but not MAX (last_call_timeout in RDZV).
set -euo pipefail

run="" previous=""
for word in "$@"; do
  case $previous in --run-dir) run=$word ;; esac
  case $word in --run-dir=*) run=${word#*=} ;; esac
  previous=$word
done

if [[ -n ${TORCHELASTIC_RUN_ID:-} ]]; then # what torchrun starts, once for each process
  if compgen -G "$run/checkpoints/step_*/state.json" >/dev/null; then
    set -- "$@" --resume
  elif [[ $RANK == 0 && -e $run/log.jsonl ]]; then # died before the first checkpoint; the others wait for process 0
    rm -rf "$run.unfinished"
    mv "$run" "$run.unfinished"
  fi
  exec python "$SCRIPT" "$@"
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export SCRIPT=${SCRIPT:-train_small.py}
nodes=${NODES:-1} head=${HEAD:-localhost:29400}
if [[ -z $run ]]; then
  echo "error: multi_node.sh needs --run-dir, a directory that all machines share" >&2
  exit 2
fi
case " $* " in *" --resume "*)
  echo "error: multi_node.sh decides by itself about --resume; leave it out" >&2
  exit 2
  ;;
esac
set -- --save-every 250 "$@"

# Mistakes are said once here, not by every process after every restart.
gpus=$(python - "$SCRIPT" "$nodes" "${GPUS:-}" "$@" <<'PYTHON'
import importlib, pathlib, sys
import torch
script, nodes, gpus, *argv = sys.argv[1:]
sys.path[:1] = [str(pathlib.Path(script).parent)]
ts = importlib.import_module(pathlib.Path(script).stem)
least, _, most = nodes.partition(":")
gpus = int(gpus or torch.cuda.device_count() or 1)
try:
    config = ts.make_config(ts.build_parser().parse_args(argv))
    ts.Dataset.open(config.data)
    for count in range(int(least), int(most or least) + 1):
        for stage in config.stage_table:
            if stage.packs % (count * gpus):
                raise ts.UserError(f"NODES={nodes} may mean {count} machines x {gpus} processes = {count * gpus}, which "
                                   f"does not divide a step of {stage.packs} packs; choose NODES and GPUS that do")
except ts.UserError as error:
    sys.exit(f"error: {error}")
print(gpus)
PYTHON
)

# Members would share the store of the meeting, whose address torch 2.13 does not tell to those that come later.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec python -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$gpus" --max-restarts="${RESTARTS:-20}" \
  --rdzv-backend=c10d --rdzv-endpoint="$head" --rdzv-id="${JOB:-$run}" ${RDZV:+--rdzv-conf="$RDZV"} \
  --no-python bash runs/multi_node.sh "$@"
