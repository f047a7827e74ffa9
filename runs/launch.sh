# Sourced by scripts that train from the repository root, after setup.sh. `train RUN_DIR FLAGS` runs train_medium.py on
# all GPUs of this machine, or without a GPU; a finished run is skipped, a stopped one goes on from its checkpoint.

gpus=$(python -c "import torch; print(torch.cuda.device_count())")
launch=(python)
if ((gpus > 1)); then
  launch=(python -m torch.distributed.run --standalone "--nproc_per_node=$gpus")
fi

train() {
  local run=$1
  shift
  if [[ -f $run/report.md ]]; then # written last
    echo "$run is finished already; remove it to train again"
  elif compgen -G "$run/checkpoints/step_*/state.json" >/dev/null; then
    echo "$run was interrupted; it continues from its last checkpoint"
    "${launch[@]}" train_medium.py --run-dir "$run" --resume
  else
    if [[ -e $run ]]; then
      echo "$run has no checkpoint; it is moved to $run.unfinished"
      rm -rf "$run.unfinished"
      mv "$run" "$run.unfinished"
    fi
    "${launch[@]}" train_medium.py "$@" --run-dir "$run"
  fi
}
