#!/usr/bin/env bash
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
# One run of train_small.py on the machines of a SLURM job, through runs/multi_node.sh. From the repository root, on a
# file system that all machines share:
#
#     sbatch runs/slurm.sh --run-dir out/first @runs/8xh100.args --data data/shards/climbmix
#     sbatch --nodes=1 --time=00:30:00 runs/slurm.sh --run-dir out/second --tokens 50000000
#     NODES=1:2 sbatch --no-kill runs/slurm.sh --run-dir out/third    # after a loss go on with one machine
#
# The flags of sbatch win over the lines above. A machine lost: SLURM ends the job and queues it again; with
# NODES=MIN:MAX and --no-kill the others go on at once, unless it was the first. Out of time: a minute before, the job
# goes back into the queue by itself. Each time the run continues from its newest complete checkpoint, so at most --save-every steps
# (250 unless given) are lost.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this file with sbatch}"
if [[ -f .venv/bin/activate ]]; then source .venv/bin/activate; fi

NODES=${NODES:-$SLURM_JOB_NUM_NODES}
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
HEAD=$first:$((20000 + SLURM_JOB_ID % 10000)) # jobs may share a machine
JOB=$SLURM_JOB_ID
export NODES HEAD JOB

requeue() {
  echo "slurm.sh: the time is nearly over; job $SLURM_JOB_ID goes back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID" || echo "slurm.sh: that was refused; submit it again" >&2
}
trap requeue USR1

lenient=()
if [[ $NODES == *:* ]]; then lenient=(--no-kill --kill-on-bad-exit=0); fi
srun "${lenient[@]}" bash runs/multi_node.sh "$@" &
pid=$! code=0
wait "$pid" || code=$?
while kill -0 "$pid" 2>/dev/null; do # a signal ends wait, not srun
  code=0
  wait "$pid" || code=$?
done
exit "$code"
