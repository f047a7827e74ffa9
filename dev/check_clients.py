"""Tries a running server with other people's clients: LangChain's and lm-evaluation-harness.

    pip install langchain-openai lm_eval           (not in the requirement files: 110 MB and more)
    python runs/serve.py out/RUN &
    python dev/check_clients.py --tokenizer FOLDER_OF_THE_EXPORT

A client that is not installed is named and left out. The harness needs a tokenizer of transformers'
form, which runs/export.py writes; it sends ids, so its log-probabilities are of the same tokens as
through transformers:

    lm_eval --model local-completions --tasks arc_easy --limit 20 --model_args \\
        model=RUN,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=FOLDER_OF_THE_EXPORT

Result: a line for each check, and exit code 1 if one fails.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import urllib.request


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


def harness(base: str, model: str, tokenizer: str) -> str:
    """A few tasks of multiple choice, whose log-probabilities come through echo."""
    arguments = f"model={model},base_url={base}/completions,tokenizer={tokenizer}"
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "--model",
        "local-completions",
        "--tasks",
        "arc_easy",
    ]
    command += ["--limit", "20", "--model_args", arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr.strip().splitlines()[-1])
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=8000, help="of the server on 127.0.0.1")
    parser.add_argument("--tokenizer", help="folder that runs/export.py wrote, for the harness")
    args = parser.parse_args()
    base = f"http://127.0.0.1:{args.port}/v1"
    try:
        with urllib.request.urlopen(f"{base}/models", timeout=10) as answer:
            model = json.loads(answer.read())["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        print(f"error: no server answers on 127.0.0.1 port {args.port} ({error}); start it first")
        return 1

    checks = {"langchain_openai": lambda: langchain(base, model)}
    if args.tokenizer:
        checks["lm_eval"] = lambda: harness(base, model, args.tokenizer)
    failed = False
    for package, check in checks.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package}: not installed")
            continue
        try:
            print(f"{package}: {check()}")
        except Exception as error:
            failed = True
            print(f"{package}: FAILED, {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
