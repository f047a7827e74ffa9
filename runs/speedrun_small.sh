#!/usr/bin/env bash
# The small model from text to chat: tokenizer, pretraining, CORE, finetuning, chat evaluation, reinforcement learning
# on sums, and one report. After each training, 200 plain questions are asked.
#
#     bash runs/speedrun_small.sh                      on all GPUs of this machine (1, 2, 4 or 8), with public data
#     bash runs/speedrun_small.sh --source pypi:p400 --sft chat.jsonl.zst --sft addition:2000      without Hugging Face
#     bash runs/speedrun_small.sh --name mine --data data/shards/b34 --bundle eval_bundle.tar.zst --files eval_extra \
#         --sft chat.jsonl.zst --sft gsm8k:eval_extra/gsm8k_train.jsonl.zst:2 --sft addition:2000 -- --tokens 34013184
#     bash runs/speedrun_small.sh --smoke              the whole chain at toy size, no GPU, no network, 1 to 5 minutes
#
# --smoke         the chain at toy size; may be combined with --name, --source and --bundle
# --name NAME     write the results to out/NAME (default: speedrun_small, or smoke with --smoke)
# --data DIR      use an existing dataset
# --source SPEC   or make one from this source of data/pretrain.py, unless it is in data/shards (default: climbmix;
#                 with --smoke: stdlib)
# --bundle PATH   CORE bundle (default: downloaded)
# --files FOLDER  tasks for chat_eval.py (default: downloaded)
# --sft SPEC      a source for data/sft.py, such as a local file, repeatable (default: smol-smoltalk, gsm8k twice, 2,000
#                 sums)
# --run-code      let chat_eval.py execute programs that the model wrote; its limits are not a security boundary
# -- FLAGS        flags for pretraining
#
# After an interruption, run it again with the same flags: it continues where it stopped. If the files of CORE or of the
# chat tasks cannot be downloaded, they are skipped with a message. The report is out/NAME/report.md, the runs are base,
# sft and rl in out/NAME, and out/NAME/log.txt has the output of all stages and their minutes.
set -euo pipefail
# shellcheck source=runs/lib/help.sh
source "$(dirname "${BASH_SOURCE[0]}")/lib/help.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="" data="" source="" bundle="" files="" smoke="" sft=() code=() flags=()
while (($#)); do
  case $1 in
  --smoke) smoke=1 ;;
  --run-code) code=(--run-code) ;;
  --name | --data | --source | --bundle | --files | --sft)
    if (($# < 2)); then
      echo "error: $1 needs a value" >&2
      exit 2
    fi
    if [[ $1 == --sft ]]; then sft+=("$2"); else printf -v "${1#--}" %s "$2"; fi
    shift
    ;;
  --)
    shift
    flags=("$@")
    break
    ;;
  *)
    echo "error: unknown flag $1; the first lines of runs/speedrun_small.sh list all flags, and flags for" \
      "pretraining follow --" >&2
    exit 2
    ;;
  esac
  shift
done
source runs/lib/setup.sh
setup requirements.txt
source runs/lib/launch.sh
[[ $smoke ]] || need_gpu

out=out/${name:-${smoke:+smoke}}
[[ $out != out/ ]] || out=out/speedrun_small
mkdir -p "$out/logs"
context=2048
finetune=()
rl=()
limit=()
if [[ $smoke ]]; then
  context=512
  source=${source:-stdlib}
  data=${data:-$out/data}
  files=${files:-$out/tasks}
  code=(--run-code --limit 16)
  flags=(@runs/cpu.args --steps 20 --eval-every 0 --save-every 10 --val-tokens 8192 "${flags[@]}")
  finetune=(--packs 1)
  rl=(--steps 2 --prompts 2 --samples 2 --eval-examples 4 --eval-samples 0)
  limit=(--limit 5)
fi
source=${source:-climbmix}

say() { # prints, also into the log
  echo "$@" | tee -a "$out/log.txt"
}

minutes() { # of a number of seconds
  echo "$(($1 / 60)).$(($1 % 60 / 6))"
}

stages=() # that were called, in order

# stage NAME COMMAND... runs a command once, and keeps its output and its time
stage() {
  stages+=("$1")
  local log=$out/logs/$1 start=$SECONDS status=0 command
  command=$(printf '%q ' "${@:2}")
  if [[ -e $log.done ]]; then
    if [[ $(<"$log.done") != "$command" ]]; then
      echo "error: $out holds the results of another command for $1; choose another --name, or remove $out" >&2
      exit 2
    fi
    say "=== $1: complete"
    return
  fi
  say "=== $1"
  "${@:2}" 2>&1 | tee -a "$log.log" "$out/log.txt" || status=$?
  echo $((SECONDS - start)) >>"$log.seconds" # a line for each attempt
  say "=== $1: $(minutes $((SECONDS - start))) minutes"
  ((status)) || echo "$command" >"$log.done"
  return $status
}

on_gpus() { # so that another number of GPUs is no other command for `stage`
  "${launch[@]}" "$@"
}

smoke_files() { # tiny tasks and conversations in every layout; printf repeats its format for each number
  local dir=$out/tasks
  mkdir -p "$dir"
  printf '{"question": "Which is %d?", "choices": ["1", "2", "3", "4"], "answer": 0}\n' {1..8} >"$dir/mmlu_test.jsonl"
  printf '{"question": "Which is %d?", "choices": {"text": ["1", "2"], "label": ["A", "B"]}, "answerKey": "A"}\n' {1..8} |
    tee "$dir/arc_challenge_test.jsonl" >"$dir/arc_easy_test.jsonl"
  printf '{"question": "Tom has %d apples and gives away all but 3.", "answer": "<<2+1=3>>3\\n#### 3"}\n' {1..30} \
    >"$dir/gsm8k_train.jsonl"
  head -n 4 "$dir/gsm8k_train.jsonl" >"$dir/gsm8k_test.jsonl"
  printf '{"prompt": "def one():\\n", "entry_point": "one", "test": "def check(f):\\n    assert f() == %d\\n"}\n' 1 \
    >"$dir/humaneval.jsonl"
  printf '{"messages": [{"role": "user", "content": "Say %d."}, {"role": "assistant", "content": "Yes!"}]}\n' {1..60} \
    >"$dir/chat.jsonl"
  grep -ohE '[a-z]{3,12}' README.md | sort -u >"$dir/words.txt"
}

# -- text and CORE tasks
if [[ $smoke ]]; then
  stage files smoke_files
  stage data python data/pretrain.py --source "$source" --vocab-size 4096 --workers 1 --out "$data"
elif [[ -z $data ]]; then
  data=${source#pypi:}
  data=data/shards/${data//[^A-Za-z0-9._-]/-}
  if [[ -f $data/dataset.json ]]; then
    say "=== data: $data exists and is used as it is"
  else
    stage data python data/pretrain.py --source "$source" --out "$data"
  fi
fi
if [[ ! -f $data/dataset.json ]]; then
  echo "error: no dataset at $data; make one with data/pretrain.py --out $data, or run this without --data" >&2
  exit 1
fi
core=(--download)
[[ -z $bundle ]] || core=(--bundle "$bundle")
core+=("${limit[@]}")
if grep -q '"core/' "$data/dataset.json"; then
  say "=== core: $data has the tasks"
elif [[ $smoke && -z $bundle ]]; then
  say "=== core: skipped, because a smoke test downloads nothing and there is no --bundle"
elif ! stage core python data/core_tasks.py "${core[@]}" --data "$data" --max-seq-len "$context"; then
  [[ -z $bundle ]] || exit 1 # the user's own file is wrong
  say "=== core: skipped, because data/core_tasks.py failed (see above); if it could not download the bundle, use --bundle"
fi

# -- conversations, before a GPU is paid for
if ((${#sft[@]} == 0)); then
  sft=(smol-smoltalk "gsm8k:hf:openai/gsm8k/main/train-*.parquet:2" addition:2000)
  tiny=("$out/tasks/chat.jsonl" "gsm8k:$out/tasks/gsm8k_train.jsonl" "spelling:$out/tasks/words.txt:60" addition:60)
  [[ ! $smoke ]] || sft=("${tiny[@]}")
fi
specs=()
for spec in "${sft[@]}"; do specs+=(--source "$spec"); done
stage conversations python data/sft.py --data "$data" --max-len $((context + 1)) "${specs[@]}"

# -- pretraining and CORE
stage base train train_small.py "$out/base" --save-every 500 "${flags[@]}" --data "$data"
if grep -q '"core/' "$data/dataset.json"; then
  stage score_core on_gpus runs/score_core.py "$out/base" "${limit[@]}"
fi
stage questions_base python runs/questions.py "$out/base"

# -- finetuning
stage sft train runs/finetune.py "$out/sft" "$out/base" --data "$data" "${finetune[@]}"

if ! stage chat_eval on_gpus runs/chat_eval.py "$out/sft" ${files:+--files "$files"} "${code[@]}"; then
  [[ -z $files ]] || exit 1
  say "=== chat_eval: skipped, because it failed (see above); if it could not download its tasks, use --files"
fi
stage questions_sft python runs/questions.py "$out/sft"

# -- reinforcement learning
stage rl train runs/rl.py "$out/rl" "$out/sft" "${rl[@]}"
stage questions_rl python runs/questions.py "$out/rl"

# -- report
{
  echo "# ${out#out/}"
  for run in base sft rl; do
    printf '\n## [%s](%s/report.md)\n\n' "$run" "$run"
    sed -n '/^## /q;/^|/p;/^$/p' "$out/$run/report.md" | cat -s
  done
  for scores in "$out"/base/core*.csv "$out"/sft/chat_eval*.csv; do
    if [[ -f $scores ]]; then printf '\n## %s\n\n```\n%s\n```\n' "${scores#"$out"/}" "$(<"$scores")"; fi
  done
  printf '\n## Right answers to 200 plain questions\n\n'
  for run in base sft rl; do
    echo "- $run: $(grep -c '"correct": true' "$out/$run/questions.jsonl" || true)"
  done
  printf '\n## Minutes of each stage, over all attempts\n\n'
  for each in "${stages[@]}"; do
    echo "- $each: $(minutes "$(($(tr '\n' '+' <"$out/logs/$each.seconds")0))")"
  done
} | tee "$out/report.md"
echo "The results are in $out. Chat with the model: python runs/serve.py $out/sft --page" \
  "(after: source .venv/bin/activate)"
