# Sourced from the repository root, after setup.sh, by the scripts that train.
#
# ${launch[@]} starts a Python script on 8, 4 or 2 GPUs of this machine, as many as there are, or else in one process,
# unless the script has set it before.
# `train SCRIPT RUN_DIR ARGUMENTS...` starts a run. It skips a finished run, and continues an interrupted one from its
# newest checkpoint:
#
#     train train_small.py out/first @runs/cpu.args
#     train runs/finetune.py out/first_sft out/first --packs 2
#
# `need_gpu` ends a script whose model is too large for a CPU.

if [[ -z ${launch:-} ]]; then
  launch=(python)
  gpus=$(python -c "import torch; print(torch.cuda.device_count())")
  for count in 2 4 8; do # the packs of a step divide by these
    if ((gpus >= count)); then
      launch=(python -m torch.distributed.run --standalone "--nproc_per_node=$count")
    fi
  done
fi

need_gpu() {
  if [[ ${gpus:-} == 0 ]]; then
    echo "error: ${0##*/} needs a GPU, but torch finds none; add --smoke to run all steps at toy size without one" >&2
    exit 1
  fi
}

train() {
  local script=$1 run=$2 states
  states=("$run"/checkpoints/step_*/state.json)
  shift 2
  if [[ -f $run/result.json ]]; then
    echo "$run is already finished; remove it to train again"
  elif [[ -e ${states[0]} ]]; then
    echo "$run was interrupted; it continues from its newest checkpoint, with the flags it was started with"
    "${launch[@]}" "$script" --run-dir "$run" --resume
  else
    if [[ -e $run ]]; then
      echo "$run has no checkpoint; it is moved to $run.unfinished"
      rm -rf "$run.unfinished"
      mv "$run" "$run.unfinished"
    fi
    "${launch[@]}" "$script" "$@" --run-dir "$run"
  fi
}
