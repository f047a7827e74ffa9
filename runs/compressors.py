"""Bits per byte of gzip and xz on the validation text of a run, beside what the model reached.

    python runs/compressors.py out/quickstart

The text is exactly what the run evaluated: the bytes of all validation targets that carry bytes, one document after
the other. The table is printed and put into the run's report.md, once however often this runs.
"""

import argparse
import gzip
import json
import lzma
import os
import sys
from pathlib import Path

import numpy as np
from chat import RunError, import_script

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- compressors -->", "<!-- /compressors -->"
PREFIX_LIMIT = 16_000_000  # bytes of training text that xz gets to see: about 10 s, and within its 64 MiB dictionary


def text_of(tokenizer, ids: np.ndarray) -> bytes:
    """Bytes of the tokens that carry text; -1 and special tokens carry none."""
    ids = ids[ids >= 0]
    return tokenizer.decode_bytes(ids[tokenizer.token_bytes[ids] > 0].tolist())


def training_text(dataset, tokens: int) -> bytes:
    """The text of the first `tokens` training tokens, which is what a run of one epoch has read."""
    parts = []
    for path in dataset.files("train"):
        ids = dataset.read(path)[:tokens].astype(np.int64)
        tokens -= len(ids)
        parts.append(text_of(dataset.tokenizer, ids))
        if not tokens:
            break
    return b"".join(parts)


def xz(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def compare(run_dir: Path) -> str:
    """The table as markdown."""
    try:
        script = import_script(run_dir)
    except RunError as error:
        sys.exit(f"error: {error}")
    try:
        config = script.read_config(run_dir)
        data = Path(config.data)
        dataset = script.Dataset.open(data if data.is_absolute() or data.exists() else ROOT / data)
        text = text_of(
            dataset.tokenizer, script.validation_batch(dataset, config).targets.numpy().reshape(-1)
        )
    except script.UserError as error:
        sys.exit(f"error: {error}")
    ran_on = json.loads((run_dir / "config.json").read_text(encoding="utf-8")).get(
        "dataset_fingerprint"
    )
    if ran_on != dataset.info.get("fingerprint"):
        sys.exit(f"error: {dataset.root} is not the dataset of this run any more: its fingerprint has changed; "
                 f"train again, or restore the dataset")  # fmt: skip
    log = run_dir / "log.jsonl"
    entries = (
        [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        if log.is_file()
        else []
    )
    scores = [entry for entry in entries if "val_bpb" in entry]
    if not scores:
        sys.exit(f"error: {log} has no val_bpb yet; let the run finish first")
    rows = [
        (f"this model, after {scores[-1]['tokens']:,} training tokens", scores[-1]["val_bpb"]),
        ("gzip -9", 8 * len(gzip.compress(text, 9)) / len(text)),
        ("xz -9e", 8 * xz(text) / len(text)),
    ]
    read = training_text(dataset, scores[-1]["tokens"])
    if config.max_epochs == 1 and len(read) <= PREFIX_LIMIT:
        rows.append(
            ("xz -9e behind the same training text", 8 * (xz(read + text) - xz(read)) / len(text))
        )
    lines = [f"| {len(text):,} bytes of validation text | bits per byte |", "| --- | ---: |"]
    lines += [f"| {name} | {bpb:.4f} |" for name, bpb in rows]
    note = "The model has learned from training text first and holds weights that are not counted; gzip and xz see " \
           "the validation text alone, as one file."  # fmt: skip
    if len(rows) == 4:
        note += (
            " The last row counts what xz adds for it after the text that the model was trained on."
        )
    return "\n".join(lines) + f"\n\n{note}\n"


def add_to_report(path: Path, table: str) -> None:
    """Puts the table between its markers: where they are, else before the samples, else at the end."""
    report = path.read_text(encoding="utf-8")
    block = f"{BEGIN}\n## Against compressors\n\n{table}{END}\n"
    if BEGIN in report and END in report:
        head, tail = report.split(BEGIN, 1)[0], report.split(END, 1)[1].removeprefix("\n")
    else:
        head, samples, tail = report.partition("\n## Samples\n")
        head, tail = head.rstrip("\n") + "\n\n", samples + tail
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(head + block + tail, encoding="utf-8")
    os.replace(temporary, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Compares a run with gzip -9 and xz -9e on its validation text."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    run_dir = parser.parse_args().run_dir
    table = compare(run_dir)
    print(table, end="")
    if (run_dir / "report.md").is_file():
        add_to_report(run_dir / "report.md", table)


if __name__ == "__main__":
    main()
