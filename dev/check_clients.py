"""Tries a running server with other people's clients: LangChain's and lm-evaluation-harness.

    pip install langchain-openai "lm_eval[hf,api]"     (not in the requirement files: 110 MB and more)
    python runs/export.py out/RUN --out out/hf
    python runs/serve.py out/RUN &
    python dev/check_clients.py --export out/hf [--questions arc_easy.jsonl]

A client that is not installed is named and left out. lm-evaluation-harness scores the same tasks
through the server and through transformers: questions of multiple choice and the perplexity of long
texts. Scores must agree to 1e-4, log-likelihoods to 1e-4 nats or a millionth of what they are. The
harness sends ids, and the server takes ids as they are. So for tasks that compare answers it must put
BOS in front itself (add_bos_token=True). Perplexity tasks always do that:

    lm_eval --model local-completions --tasks arc_easy --model_args \\
        model=RUN,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=out/hf,add_bos_token=True

Result: a line for each check, and exit code 1 if one fails.
"""

import argparse
import importlib.util
import json
import math
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TOLERANCE = 1e-4  # of scores, and of log-likelihoods in nats
ROUNDING = 1e-6  # relative, of log-likelihoods: fp32 sums of thousands of nats
LIMIT = 50  # questions
QUESTIONS = [
    ("Question: What is frozen water called?\nAnswer:", ["ice", "steam", "sand", "smoke"], 0),
    ("Question: Which of these is a planet?\nAnswer:", ["the sun", "the moon", "Mars"], 2),
    ("A list is an ordered sequence of", ["items.", "é ü 你好", "1, 2, 3"], 0),
]


def langchain(base: str, model: str) -> str:
    """Messages in the orders that LangChain's agents send them; an answer, a stream and a batch."""
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
    from langchain_openai import ChatOpenAI

    client = ChatOpenAI(base_url=base, api_key="none", model=model, max_tokens=16, temperature=0)
    talk = [SystemMessage("Be brief."), HumanMessage("Hello"), HumanMessage("Who are you?")]
    whole = client.invoke(talk).content
    streamed = "".join(chunk.content for chunk in client.stream(talk))
    more = [*talk, AIMessage(""), SystemMessage("Now in French."), HumanMessage("Again")]
    answers = client.batch([talk, more])
    if not whole == streamed == answers[0].content:
        raise AssertionError(f"{whole!r}, {streamed!r} and {answers[0].content!r} should be equal")
    return f"{len(whole)} characters, streamed and in a batch"


# ---- lm-evaluation-harness


def read_questions(path: Path | None) -> list[dict]:
    """The first questions of a file of CORE (query, choices, gold), or those above."""
    if path is None:
        return [dict(zip(("query", "choices", "gold"), one, strict=True)) for one in QUESTIONS]
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:LIMIT] if line]


def tasks(folder: Path, questions: list[dict]) -> dict[str, dict]:
    """The harness' description of two tasks: answers to choose from, and perplexity."""
    texts = [f"{one['query']} {one['choices'][one['gold']]}" for one in questions]
    rows = {
        "answers": questions,
        "perplexity": [{"text": "\n\n".join(texts[i : i + 10])} for i in range(0, len(texts), 10)],
    }
    own = {
        "answers": {
            "output_type": "multiple_choice",
            "doc_to_text": "query",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [{"metric": "acc"}],
        },
        "perplexity": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    }
    for name, config in own.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(rows[name]), encoding="utf-8")
        data = {"data_files": {"test": str(path)}, "cache_dir": str(folder)}
        config |= {"task": name, "dataset_path": "json", "dataset_kwargs": data}
        config |= {"test_split": "test"}
    return own


def score(model, task: dict) -> tuple[float, list[float]]:
    """The score of a task, and the log-likelihoods that it was computed from."""
    import lm_eval

    found = lm_eval.simple_evaluate(model, tasks=[task], bootstrap_iters=0, verbosity="ERROR")
    metric = task["metric_list"][0]["metric"]
    numbers = []
    for sample in sorted(found["samples"][task["task"]], key=lambda one: one["doc_id"]):
        for answer in sample["filtered_resps"]:
            numbers.append(answer[0] if isinstance(answer, tuple | list) else answer)
    return found["results"][task["task"]][f"{metric},none"], numbers


def harness(base: str, model: str, context: int, folder: str, questions: Path | None) -> str:
    """Scores through the server and on the export, which must agree."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    # The server takes at most a context of ids, the one to be scored included. The harness keeps
    # two of max_length for itself when it goes through a server.
    of_server = dict(
        model=model, base_url=f"{base}/completions", tokenizer=folder, num_concurrent=4,
        max_length=context + 1,
    )  # fmt: skip
    of_export = dict(
        pretrained=folder, trust_remote_code=True, device="cpu", dtype="float32",
        batch_size=4, max_length=context - 1,
    )  # fmt: skip
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, task in tasks(Path(temporary), read_questions(questions)).items():
            bos = name == "answers"
            server = LocalCompletionsAPI(**of_server, add_bos_token=bos)
            here, found = score(server, task)
            there, expected = score(HFLM(**of_export, add_bos_token=bos), task)
            pairs = list(zip(found, expected, strict=True))
            worst = max(abs(a - b) for a, b in pairs)
            line = (
                f"{name}: {here:.6f} through the server, {there:.6f} on the export; "
                f"{len(pairs)} log-likelihoods, largest difference {worst:.1e} nats"
            )
            close = [math.isclose(*pair, rel_tol=ROUNDING, abs_tol=TOLERANCE) for pair in pairs]
            if abs(here - there) > TOLERANCE or not all(close):
                raise AssertionError(line)
            lines.append(line)
    return "\n        ".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--port", type=int, default=8000, help="of the server on 127.0.0.1")
    add("--export", help="folder that runs/export.py wrote, for lm-evaluation-harness")
    add("--questions", type=Path, help="of multiple choice, a file of CORE (default: three)")
    args = parser.parse_args()
    base = f"http://127.0.0.1:{args.port}/v1"
    try:
        with urllib.request.urlopen(f"{base}/models", timeout=10) as answer:
            served = json.loads(answer.read())["data"][0]
        model = served["id"]
        context = served["max_model_len"]
    except (OSError, ValueError, LookupError) as error:
        print(f"error: no server answers on 127.0.0.1 port {args.port} ({error}); start it first")
        return 1

    checks = {"langchain_openai": lambda: langchain(base, model)}
    if args.export:
        checks["lm_eval"] = lambda: harness(base, model, context, args.export, args.questions)
    failed = False
    for package, check in checks.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package}: not installed")
            continue
        try:
            print(f"{package}: {check()}")
        except Exception as error:
            failed = True
            print(f"{package}: FAILED, {error!r}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
