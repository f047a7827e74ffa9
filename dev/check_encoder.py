"""Tries an exported encoder in sentence-transformers.

    pip install sentence-transformers             into an environment of its own, beside requirements-test.txt
    python dev/check_encoder.py out/EMBED         a small run of finetune_encoder.py; it runs on the CPU

It exports the run to a temporary folder, embeds texts with the run and with sentence-transformers, and
prints a line for each check. It ends with exit code 1 if embeddings differ by 1e-5 or more. CI does
not run it: the package is large. tests/test_encoder.py compares with transformers.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="directory of an encoder run")
    return parser.parse_args()


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
RUNS = Path(__file__).resolve().parents[1] / "runs"
sys.path[:0] = [str(RUNS), str(RUNS / "encoder")]

import encoder_model
import export_encoder
import finetune_encoder
import numpy as np
import sentence_transformers
import torch
import transformers

TOLERANCE = 1e-5
TEXTS = [
    "The river was high that spring, and nobody crossed it before May.",
    "A list is an ordered sequence of items.\n\nIts items may be of any type.",
    "é ü 你好 1, 2, 3",
    "one",
    "words that go on and on, far beyond the longest text that the model reads, " * 60,
]


def embed(run_dir: Path) -> np.ndarray:
    """Embeddings of TEXTS by the run itself."""
    model, description, _ = encoder_model.load_encoder(run_dir)
    data = finetune_encoder.Pairs(TEXTS, [])
    tokenizer = encoder_model.script.Tokenizer(run_dir / "tokenizer.json")
    data.tokenize(tokenizer, encoder_model.max_text_len(description))
    with torch.no_grad():
        packed = finetune_encoder.pack_texts(data.sequences, torch.device("cpu"))
        return model.embed_texts(*packed).numpy()


def main() -> int:
    args = parse()
    transformers.logging.set_verbosity_error()
    modules = (torch, transformers, sentence_transformers)
    print(", ".join(f"{module.__name__} {module.__version__}" for module in modules))

    expected = embed(args.run_dir)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        export_encoder.export_encoder(args.run_dir, folder)
        model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
        together = model.encode(TEXTS)
        alone = np.stack([model.encode(text) for text in TEXTS])

    failed = False
    for name, found in {"texts in one batch": together, "texts one by one": alone}.items():
        error = np.abs(found - expected).max()
        passed = error < TOLERANCE
        failed |= not passed
        print(f"{'ok  ' if passed else 'FAIL'} {name}: largest difference {error:.1e}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
