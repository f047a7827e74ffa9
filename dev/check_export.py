"""Tries an exported model in the tools that people use next: TRL, PEFT and lm-evaluation-harness.

    pip install trl peft "lm_eval[hf,api]"        into an environment of its own, beside requirements-test.txt
    python dev/check_export.py out/RUN            of pretraining or finetuning; a small one, it runs on the CPU

It exports the run to a temporary folder, compares scores of the harness with the script's, and runs the code and the
commands of the model card, with fewer steps and with tasks that need no download. It prints a line for each check, and
ends with exit code 1 if one fails. CI does not run it: these packages are large. tests/test_export_model.py compares
logits and losses.
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
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "runs"))

import datasets
import engine
import export
import lm_eval
import peft
import torch
import transformers
import trl
from check_gguf import own_logits
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

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


def script_score(run, text: str, start: int) -> float:
    """Log-likelihood of the tokens of a text from token `start` on, after BOS."""
    ids = [run.tokenizer.bos_id, *run.tokenizer.encode(text)]
    log_probs = own_logits(run, ids[:-1]).log_softmax(-1)
    return sum(log_probs[i - 1, ids[i]].item() for i in range(1 + start, len(ids)))


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


def training_data() -> datasets.Dataset:
    """Conversations about sums."""
    rows = []
    for i in range(64):
        question = {"role": "user", "content": f"What is {i} + {i % 7}?"}
        answer = {"role": "assistant", "content": f"It is {i + i % 7}."}
        rows.append({"messages": [question, answer]})
    return datasets.Dataset.from_list(rows)


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
    with serving(run_dir):
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
def serving(run_dir: Path):
    """The server at its usual address, once it answers."""
    words = [sys.executable, ROOT / "runs/serve.py", run_dir, "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(words, **pipes) as server:
        for line in server.stdout:
            if "http://" in line:
                break
        try:
            yield
        finally:
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
        check_harness(checks, run, folder)
        check_card(checks, run_dir, folder, work)
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
