#!/usr/bin/env bash
# Pretrains on several machines, and continues after one of them is lost. Run the same command on every machine;
# HEAD is the first of them:
#
#     NODES=2 HEAD=node0:29400 bash runs/cluster/multi_node.sh --run-dir /shared/out/first @runs/h100.args \
#         --min-packs 16
#
# All arguments go to train_small.py. Environment variables:
#   NODES    number of machines, N or MIN:MAX (default 1). With N, training waits until a lost machine is back or
#            another one runs this command. With MIN:MAX, training continues on the remaining machines, and a machine
#            that comes back joins again.
#   HEAD     host:port of the machine that all others connect to; it listens on the port (default localhost:29400)
#   GPUS     processes on each machine (default: its number of GPUs, or 1)
#   JOB      name of the rendezvous, in case HEAD serves several runs (default: from the run directory)
#   RESTARTS number of failures to tolerate (default 20); a machine that comes back does not count
#   RDZV     timeouts of torchrun's rendezvous, e.g. keep_alive_interval=5,join_timeout=3600
#   SCRIPT   what to run, with --run-dir, --save-every and --resume (default train_small.py)
#
# Every start and restart continues from the newest complete checkpoint, so at most --save-every steps are lost (250 by
# default). --run-dir and --data must be on a file system that all machines share. The number of tokens in a step does
# not depend on the number of processes, which must divide the packs of every stage: the default recipe starts with 8
# packs, so 8, 4, 2 or 1 processes; add --min-packs 16 for 16. With NODES=MIN:MAX every number in between must
# fit: with 16 packs 1:2 machines with 8 GPUs work, 2:4 machines with 4 GPUs do not, as three would have 12.
#
# If HEAD is lost, training ends, because torchrun keeps the list of members there: start all machines again, or use
# slurm.sh, which does. If a machine loses power without closing its connections, or a process hangs, the others end
# after torch's timeout of 10 minutes. Whenever torchrun has MIN machines but not MAX, it waits 30 s for more
# (last_call_timeout in RDZV). The report of torchrun ends with the error message of the process that failed first.
set -euo pipefail
# shellcheck source=runs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/../lib/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

run=""
previous=""
for word in "$@"; do
  case $previous in --run-dir) run=$word ;; esac
  case $word in --run-dir=*) run=${word#*=} ;; esac
  previous=$word
done
if [[ -z $run ]]; then
  echo "error: multi_node.sh needs --run-dir; pass a directory that all machines share" >&2
  exit 2
fi
run=${run%/}
states=("$run"/checkpoints/step_*/state.json)
if [[ -e $run/result.json && ! -e ${states[0]} ]]; then # finished, with --save-every -1
  echo "$run is already finished; remove it to train again"
  exit
fi

if [[ -n ${TORCHELASTIC_RUN_ID:-} ]]; then # torchrun has started this file, once for each process
  if [[ -e ${states[0]} ]]; then
    set -- "$@" --resume
  elif [[ $RANK == 0 && -e $run/log.jsonl ]]; then # it died before the first checkpoint; all wait for process 0
    rm -rf "$run.unfinished"
    mv "$run" "$run.unfinished"
  fi
  exec python "$SCRIPT" "$@"
fi

export SCRIPT=${SCRIPT:-train_small.py}
nodes=${NODES:-1}
head=${HEAD:-localhost:29400}
case " $* " in *" --resume "*)
  echo "error: multi_node.sh adds --resume where it is needed; remove it" >&2
  exit 2
  ;;
esac
min_nodes=${nodes%%:*} max_nodes=${nodes##*:}
if ! [[ $nodes =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ && ${GPUS:-1} =~ ^[1-9][0-9]*$ && -f $SCRIPT ]] ||
  ((min_nodes > max_nodes)); then
  echo "error: NODES=$nodes must be N or MIN:MAX, GPUS=${GPUS:-} a number above 0 or empty, and SCRIPT=$SCRIPT a" \
    "file; correct the one that is not" >&2
  exit 2
fi
first=()
if [[ $1 != [-@]* ]]; then # the run or the command of a tool must stay first
  first=("$1")
  shift
fi
set -- "${first[@]}" --save-every 250 "$@"

# Mistakes are reported once here, and not by every process after every restart.
gpus=$(python runs/cluster/check_nodes.py "$SCRIPT" "$nodes" "${GPUS:-}" "$@")

# Otherwise processes share the store of the rendezvous, whose address torch 2.13 does not tell to machines that join
# later.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec python -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$gpus" \
  --max-restarts="${RESTARTS:-20}" --rdzv-backend=c10d --rdzv-endpoint="$head" \
  --rdzv-id="${JOB:-${run//\//_}}" ${RDZV:+--rdzv-conf="$RDZV"} --no-python bash runs/cluster/multi_node.sh "$@"
