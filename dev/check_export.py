"""Tries an exported model in the tools that people use next: TRL, PEFT and lm-evaluation-harness.

    pip install trl peft "lm_eval[hf,api]"        into an environment of its own, beside requirements-test.txt
    python dev/check_export.py out/RUN            of pretraining or finetuning; a small one, it runs on the CPU

It exports the run to a temporary folder and prints a line for each check. It ends with exit code 1 if
one fails. The code and the commands of the model card run too, with fewer steps and with tasks that
need no download. A run of runs/portable.args also becomes a GGUF file after TRL has finetuned it, for
llama.cpp of dev/check_gguf.py. CI does not run it: these packages are large. What they print is in
dev/LOG.md.
"""

import argparse
import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="directory of a run")
    return parser.parse_args()


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runs"))

import datasets
import engine
import export
import lm_eval
import peft
import torch
import transformers
import trl
from check_gguf import ask_llama_cpp
from lib import export_portable
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

STEPS = 20
TEXTS = [
    "The river was high that spring, and nobody crossed it before May.",
    "A list is an ordered sequence of items.\n\nIts items may be of any type.",
    "é ü 你好 1, 2, 3",
]


class Checks:
    """Prints what is found and remembers what failed."""

    def __init__(self):
        self.failed = []

    def report(self, name: str, found: str, passed: bool) -> None:
        print(f"{'ok  ' if passed else 'FAIL'} {name}: {found}", flush=True)
        if not passed:
            self.failed.append(name)


def script_logits(run, ids: list[int]) -> torch.Tensor:
    """Logits of the training script's forward after each id: (T, V)."""
    count = len(ids)
    borders = torch.tensor([0, count], dtype=torch.int32)
    with torch.no_grad():
        logits = run.model(torch.tensor(ids).int(), None, torch.arange(count), borders, count)
    return logits[:, : run.tokenizer.vocab_size]


def script_score(run, text: str, start: int) -> float:
    """Log-likelihood of the tokens of a text from token `start` on, after BOS."""
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(text)]
    log_probs = script_logits(run, ids[:-1]).log_softmax(-1)
    return sum(log_probs[i - 1, ids[i]].item() for i in range(1 + start, len(ids)))


def check_logits(checks: Checks, run, model) -> None:
    rng = torch.Generator().manual_seed(0)
    count = min(1024, run.config.max_seq_len)
    ids = torch.randint(0, run.tokenizer.vocab_size, (count,), generator=rng).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    error = (logits - script_logits(run, ids)).abs().max().item()
    checks.report("logits", f"{count} tokens, largest difference {error:.1e}", error < 1e-5)


def instance(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def check_harness(checks: Checks, run, folder: str) -> None:
    """Scores of lm-evaluation-harness with the options of the model card, against the script's."""
    common = dict(pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32")

    # Answers compared: the tokenizer adds BOS. The harness splits a text between two words.
    judge = HFLM(**common)
    pairs = [(text.split(" ")[0], text[len(text.split(" ")[0]) :]) for text in TEXTS]
    found = judge.loglikelihood([instance("loglikelihood", *pair) for pair in pairs])
    starts = [len(run.tokenizer.encode(first)) for first, _ in pairs]
    expected = [script_score(run, text, start) for text, start in zip(TEXTS, starts, strict=True)]
    error = max(abs(a[0] - b) for a, b in zip(found, expected, strict=True))
    checks.report("harness, answers", f"largest difference {error:.1e} nats", error < 1e-3)

    # Perplexity: the harness adds BOS itself.
    requests = [instance("loglikelihood_rolling", text) for text in TEXTS]
    expected = [script_score(run, text, 0) for text in TEXTS]
    found = HFLM(**common, add_bos_token=False).loglikelihood_rolling(requests)
    error = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    checks.report("harness, perplexity", f"largest difference {error:.1e} nats", error < 1e-3)
    twice = judge.loglikelihood_rolling(requests)
    error = max(abs(a - b) for a, b in zip(twice, expected, strict=True))
    checks.report("harness, perplexity with two BOS", f"differs by {error:.1e} nats", error > 1e-3)


def training_data() -> datasets.Dataset:
    """Conversations about sums."""
    rows = []
    for i in range(64):
        question = {"role": "user", "content": f"What is {i} + {i % 7}?"}
        answer = {"role": "assistant", "content": f"It is {i + i % 7}."}
        rows.append({"messages": [question, answer]})
    return datasets.Dataset.from_list(rows)


def train(checks: Checks, name: str, folder: str, work: Path, **trainer_options):
    """20 steps with TRL's defaults, but for what a small model on a CPU needs. Returns the trainer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    args = trl.SFTConfig(
        output_dir=str(work / name),
        max_steps=STEPS,
        logging_steps=1,
        learning_rate=1e-3,
        max_length=min(1024, model.config.max_position_embeddings),
        assistant_only_loss=True,
        eos_token="<|assistant_end|>",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=args,
        train_dataset=training_data(),
        processing_class=tokenizer,
        **trainer_options,
    )
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)

    # TRL computes the loss from the head's weight, and must come to what the model itself says.
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        fused = trainer.model(**batch, fused_lm_head=True).loss.item()
        plain = trainer.model(**batch).loss.item()
    difference = abs(fused - plain)
    found = f"{fused:.6f} by TRL, {plain:.6f} by the model"
    checks.report(f"{name}, loss", found, difference < 1e-4)

    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"
    checks.report(name, found, len(losses) == STEPS and losses[-1] < losses[0])
    return trainer


def check_llama_cpp(checks: Checks, trainer, work: Path) -> None:
    """Greedy answers of llama.cpp after finetuning, against transformers."""
    trainer.save_model(work / "tuned")
    export.main([str(work / "tuned"), "--gguf", str(work / "tuned.gguf"), "--type", "f32"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "tuned")
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "tuned")
    chats = [[{"role": "user", "content": f"What is {i} + {i % 5}?"}] for i in range(100, 120)]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = [tokenizer.apply_chat_template(chat, **options) for chat in chats]
    prompts = [row["input_ids"][0].tolist() for row in inputs]
    found = ask_llama_cpp(work, work / "tuned.gguf", {"prompts": prompts, "count": 20})["prompts"]
    texts = [model.generate(**row, do_sample=False, max_new_tokens=20)[0].tolist() for row in inputs]
    # It goes on behind the end of an answer, where transformers stops.
    found = [row[: (row + [tokenizer.eos_token_id]).index(tokenizer.eos_token_id) + 1] for row in found]
    equal = sum(ours == ids + theirs for ours, ids, theirs in zip(texts, prompts, found, strict=True))
    sample = tokenizer.decode(found[0])
    checks.report("llama.cpp", f"{equal} of {len(chats)} greedy answers equal, as {sample!r}", equal == len(chats))


def check_lora(checks: Checks, folder: str, work: Path) -> None:
    options = peft.LoraConfig(target_modules="all-linear", r=8, task_type="CAUSAL_LM")
    trainer = train(checks, "LoRA", folder, work, peft_config=options)
    adapted = {name.split(".")[-1] for name in trainer.model.targeted_module_names}
    expected = {"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
    checks.report("LoRA, modules", " ".join(sorted(adapted)), adapted >= expected)

    # The adapter loads again, and merges into the weights.
    trainer.model.save_pretrained(work / "adapter")
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    again = peft.PeftModel.from_pretrained(fresh, work / "adapter")
    ids = torch.arange(3, 60)[None]
    plain = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    with torch.no_grad():
        trained = plain(ids).logits
        loaded = again.eval()(ids).logits
        merged = again.merge_and_unload()(ids).logits
    error = max((loaded - trained).abs().max().item(), (merged - trained).abs().max().item())
    checks.report("LoRA, loaded and merged", f"largest difference {error:.1e}", error < 1e-3)


# Tasks in place of those of the card, which the harness would download.
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{first}}}}"
doc_to_target: "{{{{rest}}}}"
metric_list: [{{metric: {metric}}}]
"""


def write_tasks(folder: Path) -> None:
    """The task `answers` scores continuations, `texts` measures perplexity."""
    rows = [dict(zip(("first", "rest"), text.split(" ", 1), strict=True)) for text in TEXTS]
    (folder / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    rows = [{"first": "", "rest": text} for text in TEXTS]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    kinds = {"answers": ("loglikelihood", "perplexity")}
    kinds["texts"] = ("loglikelihood_rolling", "bits_per_byte")
    for name, (kind, metric) in kinds.items():
        text = TASK.format(name=name, file=folder / f"{name}.jsonl", kind=kind, metric=metric)
        (folder / f"{name}.yaml").write_text(text)


def check_card(checks: Checks, run_dir: Path, folder: str, work: Path) -> None:
    """The blocks of code one after the other, then the commands of the harness, in another folder."""
    card = (Path(folder) / "README.md").read_text(encoding="utf-8")
    conversations = training_data()
    pairs = [
        {"prompt": [question], "chosen": [answer], "rejected": [question | {"role": "assistant"}]}
        for question, answer in conversations["messages"]
    ]
    scope = {"conversations": conversations, "preferences": datasets.Dataset.from_list(pairs)}
    os.chdir(work)
    for block in re.findall(r"```python\n(.*?)```", card, re.S):
        few = 'output_dir="\\1", use_cpu=True, max_steps=2, report_to="none", save_strategy="no"'
        exec(re.sub(r'output_dir="(\w+)"', few, block), scope)
        checks.report("card", f"ran {block.splitlines()[0]}", True)

    write_tasks(work)
    root = Path(__file__).resolve().parents[1]
    with serving(root, run_dir):
        for command in re.findall(r"^lm_eval (?:.*\\\n)*.*$", card, re.M):
            task = "texts" if "wikitext" in command else "answers"
            command = command.replace("\\\n", " ")
            words = shlex.split(re.sub(r"--tasks \S+", f"--tasks {task}", command))
            words += ["--include_path", str(work)]
            words += ["--device", "cpu"] if "--model hf" in command else []
            done = subprocess.run(words, capture_output=True, text=True)
            found = [line for line in done.stdout.splitlines() if line.startswith(f"|{task}")]
            checks.report("card", found[0] if found else done.stderr[-300:], bool(found))


@contextlib.contextmanager
def serving(root: Path, run_dir: Path):
    """The server at its usual address, once it answers."""
    words = [sys.executable, root / "runs/serve.py", run_dir, "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, **pipes) as server:
        for line in server.stdout:
            if "http://" in line:
                break
        yield
        server.terminate()


def main() -> None:
    run_dir = parse().run_dir.resolve()
    transformers.logging.set_verbosity_error()
    versions = [f"{m.__name__} {m.__version__}" for m in (torch, transformers, trl, peft)]
    print(", ".join([*versions, f"lm_eval {lm_eval.__version__}"]))

    run = engine.load_run(run_dir, device="cpu", dtype="float32", attention="sdpa")
    checks = Checks()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        folder = str(work / "model")
        export.main([str(run_dir), "--out", folder, "--name", folder])
        load = transformers.AutoModelForCausalLM.from_pretrained
        check_logits(checks, run, load(folder, trust_remote_code=True))
        check_harness(checks, run, folder)
        trainer = train(checks, "SFT", folder, work)
        if not export_portable.why_not_portable(run.model):
            check_llama_cpp(checks, trainer, work)
        check_lora(checks, folder, work)
        check_card(checks, run_dir, folder, work)
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
