"""Continues texts with the model of a run directory.

    python runs/sample.py out/RUN --prompt "The sky is" --prompt "Once upon a time"

The text appears as it is generated. The last line is one JSON object: new_tokens, seconds, run_dir.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import engine


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("run_dir", metavar="RUN_DIR", type=Path)
    add("--prompt", action="append", help="a text to continue, repeatable (default: an empty one)")
    add("--tokens", type=int, default=128, help="the most new tokens for each prompt")
    add("--temperature", type=float, default=0.8, help="0: always the most likely token")
    add("--top-k", type=int, default=50, help="sample from this many tokens, 0: from all")
    add(
        "--top-p", type=float, default=1.0, help="sample from the tokens with this much probability"
    )
    add("--seed", type=int, default=0, help="the same seed gives the same text")
    add("--step", type=int, help="checkpoint to use (default: the newest)")
    add("--attention", metavar="NAME", help="attention backend for the prompt")
    add("--dtype", metavar="NAME", help="of the weights, e.g. float32 (default: that of the run)")
    add("--device", help="cuda, mps or cpu (default: the best available)")
    return parser


def check_flags(args: argparse.Namespace) -> None:
    """Raises RunError if a flag has a value that makes no sense."""
    if args.tokens < 1:
        raise engine.RunError(f"--tokens {args.tokens} must be at least 1")
    if args.temperature < 0 or args.top_k < 0:
        raise engine.RunError("--temperature and --top-k must be at least 0")
    if not 0 < args.top_p <= 1:
        raise engine.RunError(f"--top-p {args.top_p} must be above 0 and at most 1")


def sample(args: argparse.Namespace) -> dict:
    """Prints the continuation of each prompt. Returns what the last line shows."""
    check_flags(args)
    changes = {"attention": args.attention, "dtype": args.dtype}
    changes = {name: value for name, value in changes.items() if value is not None}
    run = engine.load_run(args.run_dir, args.step, args.device, **changes)
    generator = engine.Generator(run.model, run.tokenizer)

    start = time.perf_counter()
    new_tokens = 0
    for prompt in args.prompt or [""]:
        room = run.config.max_seq_len - len(run.tokenizer.encode(prompt))
        pieces = generator.stream_text(
            prompt,
            max_tokens=max(1, min(args.tokens, room)),
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        )
        print(prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
            new_tokens += 1
        new_tokens -= 1  # the last piece belongs to no token
        print()
    seconds = time.perf_counter() - start
    return {"new_tokens": new_tokens, "seconds": seconds, "run_dir": str(args.run_dir)}


def main() -> int:
    args = build_parser().parse_args()
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows "?"
    try:
        print(json.dumps(sample(args)), flush=True)
        return 0
    except engine.RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
