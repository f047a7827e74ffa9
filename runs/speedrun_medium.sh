#!/usr/bin/env bash
# From text to a chat model aiming at GPT-2's CORE, with train_medium.py on all GPUs of this machine: data, tokenizer,
# pretraining, CORE, finetuning, export, chat evaluation, report.
#
#     bash runs/speedrun_medium.sh             the whole thing; 8 GPUs of 80 GiB, 100 GB of disk
#     bash runs/speedrun_medium.sh --smoke     no GPU: a tiny model in minutes, without CORE and chat evaluation
#
# What to expect on 8 H200s, computed from one H200 (measured at 172,500 tokens/s) times 7.5 (not measured):
#
#     data           140 files of climbmix, 14 GB to download; 6.5 billion tokens, 13 GB; 16 cores   0.5 hours
#     pretraining    1.38 billion parameters, 5.84 billion tokens, 2.6e19 FLOPs; 5,568 steps         1.3 hours
#     CORE           91,037 examples                                                                 5 minutes
#     finetuning     460,000 conversations, about 0.4 billion tokens                                 10 minutes
#     GPU time       1.5 hours of 8 GPUs: 12 GPU hours, 36 USD at 3 USD each
#
# The target is a CORE score of at least 0.2565, that of GPT-2 XL; nanochat d24 reaches 0.2626 with as many tokens after
# 99 minutes on 8 H100s. After an interruption, run it again: it continues, and skips the steps that are complete. The
# results are in out/speedrun_medium and out/speedrun_medium_sft, each with a report.md, and in out/speedrun_medium_hf
# for transformers.
set -euo pipefail
# shellcheck source=runs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
smoke=
case "$*" in "") ;; --smoke) smoke=1 ;; *)
  echo "error: speedrun_medium.sh has no flag but --smoke, found: $*; for other recipes call train_medium.py" >&2
  exit 2
  ;;
esac
source runs/lib/setup.sh
setup requirements.txt
source runs/lib/launch.sh
[[ $smoke ]] || need_gpu

data=data/shards/climbmix_6b
run=out/speedrun_medium
pretrain=(--save-every 500)
conversations=(--source smol-smoltalk)
finetune=()
if [[ $smoke ]]; then
  data=data/shards/stdlib
  run=out/smoke_medium
  pretrain=(@runs/cpu_medium.args --steps 20 --width 64 --head-dim 16)
  finetune=(--steps 4 --packs 1)
fi

# -- data: text, a tokenizer with 32,768 entries, token shards; then the CORE tasks
if [[ $smoke ]]; then
  python data/pretrain.py --source stdlib --vocab-size 4096 --out "$data"
  conversations=(--source addition:200 --max-len 512)
else
  python data/pretrain.py --source climbmix --max-files 140 --out "$data"
  if ! compgen -G "$data/core/*.npz" >/dev/null; then
    python data/core_tasks.py --download --data "$data"
  fi
fi

# -- conversations, before a GPU is paid for
if [[ ! -f $data/sft/train_000000.bin ]]; then
  python data/sft.py --data "$data" "${conversations[@]}"
fi

# -- pretraining and CORE
train train_medium.py "$run" --data "$data" "${pretrain[@]}"
if [[ ! $smoke && ! -f $run/core.csv ]]; then
  "${launch[@]}" runs/score_core.py "$run"
fi

# -- finetuning on conversations
train runs/finetune.py "${run}_sft" "$run" --data "$data" "${finetune[@]}"

# -- export and chat evaluation
if [[ ! -d ${run}_hf ]]; then
  python runs/export.py "${run}_sft" --out "${run}_hf"
fi
if [[ ! $smoke && ! -f ${run}_sft/chat_eval.csv ]]; then
  "${launch[@]}" runs/chat_eval.py "${run}_sft" # --run-code would add HumanEval
fi

# -- results
for name in "$run" "${run}_sft"; do
  echo
  sed -n '1,/^## /{/^## /!p}' "$name/report.md"
done
echo "The results are in $run, ${run}_sft and ${run}_hf. This took $SECONDS s."
echo "Chat: python runs/chat.py ${run}_sft (after: source .venv/bin/activate)"
