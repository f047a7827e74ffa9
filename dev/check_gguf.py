"""Compares a portable run with what llama.cpp makes of its GGUF files: tokens, greedy texts and bits per byte.

It needs Node.js and llama.cpp as a package:

    npm install --prefix .venv --omit=optional node-llama-cpp@3.22.1 @node-llama-cpp/linux-x64@3.22.1
    python dev/check_gguf.py out/RUN stdlib [MORE_SOURCES...]          as --source of data/pretrain.py

The texts are cut into 2,000 pieces for the tokens. Of them 60 are scored and 20 continued by 64 tokens. llama.cpp keeps
keys and values in fp16. Where its greedy choice is not ours, our logits of both are shown: a tie, or not.
"""

# ruff: noqa: E402
import argparse
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="directory of a run with runs/portable.args")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="test text, as --source of data/pretrain.py")
    return parser.parse_args()


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "runs"), str(ROOT / "data")]
import engine
import export
import sources
import torch
import torch.nn.functional as F

NODE_MODULES = Path(os.environ.get("NODE_MODULES", ROOT / ".venv/node_modules"))


def read_pieces(names: list[str], count: int) -> list[str]:
    """As many pieces of up to 800 characters from each source, five from a document."""
    pieces = []
    for name in names:
        texts = sources.Source([name]).train()
        found = (text[i : i + 800] for text in texts for i in range(0, min(len(text), 4000), 800))
        pieces += itertools.islice(found, count // len(names))
    return pieces


def own_logits(run, ids: list[int]) -> torch.Tensor:
    count = len(ids)
    borders = torch.tensor([0, count], dtype=torch.int32)
    with torch.no_grad():
        logits = run.model(torch.tensor(ids).int(), None, torch.arange(count), borders, count)
    return logits[:, : run.tokenizer.vocab_size]


def ask_llama_cpp(folder: Path, model: Path, request: dict) -> dict:
    asked = folder / "request.json"
    answered = folder / "answer.json"
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = ["node", ROOT / "tests/llama_cpp.mjs", NODE_MODULES, model, asked, answered]
    subprocess.run(command, check=True)
    return json.loads(answered.read_text(encoding="utf-8"))


def compare_greedy(run, prompts: list, found: list) -> str:
    """How many continuations are ours, and where the others leave."""
    equal = 0
    parted = []
    for ids, theirs in zip(prompts, found, strict=True):
        logits = own_logits(run, ids + theirs)[len(ids) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(theirs)[:, None])[:, 0]
        lost = logits.amax(1) - chosen
        first = int((lost > 0).nonzero()[0]) if (lost > 0).any() else None
        if first is None:
            equal += 1
        else:
            parted.append(f"token {first}: {logits[first].max():.4f} against {chosen[first]:.4f}")
    return f"{equal} of {len(prompts)} equal; {'; '.join(parted) or 'no tie'}"


def main() -> None:
    args = parse()
    if not (shutil.which("node") and (NODE_MODULES / "node-llama-cpp").is_dir()):
        sys.exit(f"error: node or {NODE_MODULES}/node-llama-cpp is missing; install both, as --help says")
    run = engine.load_run(args.run_dir, device="cpu")
    run.model.float()
    context = run.model.config.max_seq_len
    pieces = read_pieces(args.sources, 2000)
    ids = [[run.tokenizer.bos_id, *run.tokenizer.encode(piece)][:context] for piece in pieces]
    every = max(1, len(ids) // 60)
    scored = [found for found in ids[::every] if len(found) > 1]
    prompts = [found[:32] for found in scored[::3]][:20]
    text_bytes = sum(len(run.tokenizer.encoding.decode_bytes(found[1:])) for found in scored)
    nats = sum(
        F.cross_entropy(own_logits(run, found)[:-1], torch.tensor(found[1:]), reduction="sum").item()
        for found in scored
    )
    bpb = nats / math.log(2) / text_bytes

    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for kind in ("f32", "f16", "q8_0"):
            model = folder / f"{kind}.gguf"
            export.main([str(args.run_dir), "--gguf", str(model), "--type", kind])
            request = {"prompts": prompts, "count": min(64, context - 32), "scored": scored}
            answer = ask_llama_cpp(folder, model, request | {"texts": pieces if kind == "f32" else []})
            if kind == "f32":
                both = zip(pieces, answer["texts"], strict=True)
                right = sum(run.tokenizer.encode(piece) == found["ids"] for piece, found in both)
                print(f"tokens: {right} of {len(pieces)} texts equal")
            theirs = sum(map(sum, answer["scored"])) / math.log(2) / text_bytes
            print(f"{kind}: greedy {compare_greedy(run, prompts, answer['prompts'])}")
            print(f"{kind}: {theirs:.5f} bits per byte, ours {bpb:.5f}, {theirs - bpb:+.5f}", flush=True)


if __name__ == "__main__":
    main()
