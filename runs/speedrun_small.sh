#!/usr/bin/env bash
# The small model's whole life in a row: text, tokenizer, pretraining, CORE, finetuning, chat evaluation, one report.
#
#     bash runs/speedrun_small.sh                      on all GPUs of this machine (1, 2, 4 or 8), with public data
#     bash runs/speedrun_small.sh --name mine --data data/shards/b34 --bundle eval_bundle.tar.zst --files eval_extra \
#         --sft chat.jsonl.zst --sft gsm8k:eval_extra/gsm8k_train.jsonl.zst:2 --sft addition:2000 -- --tokens 34013184
#     bash runs/speedrun_small.sh --smoke              everything at toy size on a CPU, without network, under 3 minutes
#
# --smoke         the toy; --name and --bundle go with it
# --name NAME     results go to out/NAME (default speedrun_small; smoke with --smoke)
# --data DIR      a dataset that is there already
# --source SPEC   or what data/pretrain.py makes one of (default climbmix)
# --bundle PATH   CORE bundle (default: downloaded)
# --files FOLDER  tasks of chat_eval.py (default: downloaded)
# --sft SPEC      a source of data/sft.py, repeatable (default: smol-smoltalk, gsm8k twice, 2,000 sums)
# --run-code      lets chat_eval.py execute programs of the model; no security boundary
# -- FLAGS        go to pretraining
#
# Run again, it goes on where it stopped. What cannot be downloaded is left out, with a line that says so.
# Result: out/NAME/report.md, with the runs in out/NAME/base and out/NAME/sft and what was printed in out/NAME/logs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="" data="" source=climbmix bundle="" files="" smoke="" sft=() code=() flags=()
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
    echo "error: unknown flag $1; the first lines of runs/speedrun_small.sh list all, flags for pretraining stand" \
      "behind --" >&2
    exit 2
    ;;
  esac
  shift
done
source runs/setup.sh
setup requirements.txt

out=out/${name:-${smoke:+smoke}}
[[ $out != out/ ]] || out=out/speedrun_small
mkdir -p "$out/logs"
context=2048
if [[ $smoke ]]; then
  context=512 source=stdlib files=${files:-$out/tasks} code=(--run-code --limit 16)
  data=${data:-$out/data}
  flags=(@runs/cpu.args --steps 20 --eval-every 0 --save-every 10 --set val_tokens=8192 --set sft_packs=1
    --set core_items=5 "${flags[@]}")
fi
gpus=$(python -c "import torch; print(torch.cuda.device_count())")
launch=(python)
for n in 8 4 2; do # a step's packs divide over these
  if ((gpus >= n)); then
    launch=(torchrun --standalone "--nproc_per_node=$n")
    break
  fi
done

# stage NAME COMMAND...: runs it once; what it prints and how long it took are kept
stage() {
  local log=$out/logs/$1 start=$SECONDS status=0
  if [[ -e $log.done ]]; then
    echo "=== $1: done already"
    return
  fi
  echo "=== $1"
  "${@:2}" 2>&1 | tee "$log.log" || status=$?
  echo $((SECONDS - start)) >>"$log.seconds" # a line for each attempt
  ((status)) || touch "$log.done"
  return $status
}

# train COMMAND RUN_DIR FLAGS...: a new run, or the rest of one that was interrupted
train() {
  local run=$2
  if compgen -G "$run/checkpoints/step_*/state.json" >/dev/null; then
    "${launch[@]}" train_small.py "$1" --run-dir "$run" --resume
  else
    rm -rf "$run"
    "${launch[@]}" train_small.py "$1" --run-dir "$run" "${@:3}"
  fi
}

smoke_files() { # tiny tasks and conversations of every layout
  python - "$out/tasks" <<'PYTHON'
import json, re, sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
choice = [{"question": f"Which is {n}?", "choices": [str(n + i) for i in range(4)], "answer": 0} for n in range(8)]
arc = [{"question": c["question"], "choices": {"text": c["choices"], "label": list("ABCD")}, "answerKey": "A"}
       for c in choice]
grade = [{"question": f"Tom has {n} apples and gets {n}.", "answer": f"<<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
         for n in range(2, 30)]
human = [{"prompt": "def one():\n", "entry_point": "one", "test": "def check(f):\n    assert f() == 1\n"}]
chat = [{"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(60)]
for name, items in (("arc_easy_test", arc), ("arc_challenge_test", arc), ("mmlu_test", choice), ("humaneval", human),
                    ("gsm8k_test", grade[:4]), ("gsm8k_train", grade[4:]), ("chat", chat)):
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
words = sorted(set(re.findall("[a-z]{3,12}", Path("README.md").read_text(encoding="utf-8"))))
(folder / "words.txt").write_text("\n".join(words))
PYTHON
}

# -- text and CORE tasks
if [[ $smoke ]]; then
  stage files smoke_files
  stage data python data/pretrain.py --source "$source" --vocab-size 4096 --workers 1 --out "$data"
elif [[ -z $data ]]; then
  data=data/shards/${source//[^A-Za-z0-9._-]/-}
  stage data python data/pretrain.py --source "$source" --out "$data"
fi
core=(--download)
[[ -z $bundle ]] || core=(--bundle "$bundle")
[[ ! $smoke ]] || core+=(--items 5)
if grep -q '"core/' "$data/dataset.json"; then
  echo "=== core: $data has the tasks already"
elif [[ $smoke && -z $bundle ]]; then
  echo "=== core: left out, there is no --bundle and a smoke test downloads nothing"
elif ! stage core python data/core.py "${core[@]}" --data "$data" --max-seq-len "$context"; then
  [[ -z $bundle ]] || exit 1 # the user's own file is wrong
  echo "=== core: left out, the bundle could not be downloaded; give one with --bundle"
fi

# -- training
stage base train pretrain "$out/base" --save-every 500 "${flags[@]}" --data "$data"
if ((${#sft[@]} == 0)); then
  sft=(smol-smoltalk "gsm8k:hf:openai/gsm8k/main/train-*.parquet:2" addition:2000)
  tiny=("$out/tasks/chat.jsonl" "gsm8k:$out/tasks/gsm8k_train.jsonl" "spelling:$out/tasks/words.txt:60" addition:60)
  [[ ! $smoke ]] || sft=("${tiny[@]}")
fi
specs=()
for spec in "${sft[@]}"; do specs+=(--source "$spec"); done
stage conversations python data/sft.py --data "$data" --max-len $((context + 1)) "${specs[@]}"
stage sft train sft "$out/sft" --from "$out/base" --data "$data"

# -- evaluation and report
stage chat_eval "${launch[@]}" runs/chat_eval.py "$out/sft" ${files:+--files "$files"} "${code[@]}"
python - "$out" <<'PYTHON'
import json, sys
from pathlib import Path

out = Path(sys.argv[1])


def result(stage):
    lines = (out / "logs" / f"{stage}.log").read_text(encoding="utf-8").splitlines()
    return json.loads([line for line in lines if line.startswith("{")][-1])


def seconds(stage):
    path = out / "logs" / f"{stage}.seconds"
    return sum(map(int, path.read_text().split())) if path.exists() else None


base, sft, chat = (result(stage) for stage in ("base", "sft", "chat_eval"))
machine = json.loads((out / "base/config.json").read_text(encoding="utf-8"))["machine"]
rows = [("val bpb after pretraining", f"{base['val_bpb']:.4f}"),
        ("CORE", f"{base['core']:.4f}" if "core" in base else "left out"),
        ("val bpb of the answers after finetuning", f"{sft['val_bpb']:.4f}"),
        (f"ChatCORE, {len(chat['tasks'])} tasks", f"{chat['chatcore']:.4f}"),
        *((f"- {task}, accuracy", f"{accuracy:.4f}") for task, accuracy in chat["tasks"].items()),
        ("tokens of pretraining", f"{base['tokens']:,}"),
        ("training seconds, pretraining + finetuning", f"{base['train_seconds']:.1f} + {sft['train_seconds']:.1f}")]
stages = ("data", "core", "base", "conversations", "sft", "chat_eval")
spent = [(stage, s) for stage in stages if (s := seconds(stage)) is not None]
rows += [(f"seconds of {stage}, all in", str(s)) for stage, s in spent]
rows += [("seconds in total", str(sum(s for _, s in spent))),
         ("device", f"{machine['num_devices']} x {machine['device']}"), ("torch", machine["torch"])]
table = "\n".join(f"| {key} | {value} |" for key, value in rows)
text = f"# {out.name}\n\n| | |\n| --- | ---: |\n{table}\n\nRuns: [base](base/report.md), [sft](sft/report.md)\n"
(out / "report.md").write_text(text, encoding="utf-8")
print(text)
PYTHON
echo "Everything is in $out. Talk to the model: python runs/chat.py $out/sft   (after: source .venv/bin/activate)"
