#!/usr/bin/env bash
# Runs train_small.py on the machines of a SLURM job, through multi_node.sh. Submit it from the repository root, on a
# file system that all machines share:
#
#     sbatch runs/cluster/slurm.sh --run-dir out/first @runs/8xh100.args --min-packs 16
#     sbatch --nodes=1 --time=00:30:00 runs/cluster/slurm.sh --run-dir out/second --tokens 50000000
#     NODES=1:2 sbatch --no-kill runs/cluster/slurm.sh --run-dir out/third --min-packs 16
#
# Two machines with 8 GPUs have 16 processes, for which the default recipe needs --min-packs 16 (see multi_node.sh).
# Flags of sbatch override the #SBATCH lines. If a machine is lost, SLURM ends the job and queues it again; with
# NODES=MIN:MAX and --no-kill, as in the last example, the other machines continue at once, unless the first one was
# lost. A minute before its time is up, the job queues itself again. The run always continues from its newest complete
# checkpoint, so at most --save-every steps (250 by default) are lost.

#SBATCH --job-name=decoderstack
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
set -euo pipefail
# SLURM runs a copy of this file, with no lib/ beside it.
# shellcheck source=runs/lib/help.sh
if [[ -z ${SLURM_JOB_ID:-} ]]; then source "$(dirname "${BASH_SOURCE[0]}")/../lib/help.sh"; fi
cd "${SLURM_SUBMIT_DIR:?start this file with sbatch}"
if [[ -f .venv/bin/activate ]]; then source .venv/bin/activate; fi

NODES=${NODES:-$SLURM_JOB_NUM_NODES}
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=$first:$((20000 + SLURM_JOB_ID % 10000)) # a port of its own, since jobs may share a machine
JOB=$SLURM_JOB_ID
export NODES HEAD JOB

requeue() {
  echo "slurm.sh: time is nearly over; job $SLURM_JOB_ID goes back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID" || echo "slurm.sh: SLURM refused to queue the job; submit it again" >&2
}
trap requeue USR1

lenient=()
if [[ $NODES == *:* ]]; then lenient=(--no-kill --kill-on-bad-exit=0); fi
srun "${lenient[@]}" bash runs/cluster/multi_node.sh "$@" &
pid=$!
code=0
wait "$pid" || code=$?
while kill -0 "$pid" 2>/dev/null; do # a signal ends wait, not srun
  code=0
  wait "$pid" || code=$?
done
exit "$code"
