"""Bits per byte of gzip and xz on the validation text of a run, next to those of the model.

    python runs/compressors.py out/quickstart

The text is exactly what the run evaluated: the bytes of all validation targets, document by document. The table is
printed and added to the run's report.md. This executes the training script in the run directory.
"""

import argparse
import gzip
import lzma
import sys
from pathlib import Path

import numpy as np
from lib import report
from lib.command import RunError, run_command

HEADING = "## Against compressors"
PREFIX_LIMIT = 16_000_000  # bytes of training text that xz may read first, which takes about 10 s
NOTE = "The model has seen training text, and its weights are not included. "
NOTE += "gzip and xz see only the validation text, as one file."
PREFIX_NOTE = " In the last row xz has seen the training text too; only the bytes that it adds are given."


def text_of(tokenizer, ids: np.ndarray) -> bytes:
    """Bytes of the tokens that carry text; -1 and special tokens carry none."""
    ids = ids[ids >= 0]
    return tokenizer.decode_bytes(ids[tokenizer.token_bytes[ids] > 0].tolist())


def training_text(dataset, tokens: int) -> bytes:
    """The text of the first `tokens` training tokens: what a run of one epoch has read."""
    parts = []
    for path in dataset.files("train"):
        ids = dataset.read(path)[:tokens].astype(np.int64)
        tokens -= len(ids)
        parts.append(text_of(dataset.tokenizer, ids))
    return b"".join(parts)


def xz(text: bytes) -> int:
    """Bytes that a text takes in xz's slowest and smallest form."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def compare(script, run_dir: Path) -> str:
    """The table as markdown. Raises: RunError"""
    config = script.read_config(run_dir)
    dataset = script.Dataset.open(config.data)
    if script.read_description(run_dir)["dataset_fingerprint"] != dataset.info.get("fingerprint"):
        raise RunError(f"{dataset.root} has another fingerprint since the run; restore it, or train again")
    documents = script.scored_documents(script.validation_documents(dataset, config), config)
    batch = script.validation_batch(documents, config, dataset.tokenizer.bos_id)
    text = text_of(dataset.tokenizer, batch.targets.numpy().reshape(-1))

    scores = [entry for entry in report.read_log(run_dir) if "val_bpb" in entry]
    if not scores:
        raise RunError(f"{run_dir} has no val_bpb in its log yet; let the run finish first")
    score = scores[-1]

    bits = {"gzip -9": 8 * len(gzip.compress(text, 9)), "xz -9e": 8 * xz(text)}
    note = NOTE
    read = training_text(dataset, score["tokens"])
    if config.max_epochs == 1 and len(read) <= PREFIX_LIMIT:
        bits["xz -9e after the same training text"] = 8 * (xz(read + text) - xz(read))
        note += PREFIX_NOTE
    rows = [(f"this model, after {score['tokens']:,} training tokens", f"{score['val_bpb']:.4f}")]
    rows += [(name, f"{count / len(text):.4f}") for name, count in bits.items()]
    header = f"| {len(text):,} bytes of validation text | bits per byte |"
    return report.table(header, "| --- | ---: |", rows) + f"\n{note}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="run directory")
    run_dir = parser.parse_args().run_dir

    def work() -> None:
        from engine import import_script  # with PyTorch, for which --help need not wait

        table = compare(import_script(run_dir), run_dir)
        print(table, end="")
        report_file = run_dir / "report.md"
        if report_file.is_file() and HEADING not in report_file.read_text(encoding="utf-8"):
            with report_file.open("a", encoding="utf-8") as file:
                file.write(f"\n{HEADING}\n\n{table}")

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
