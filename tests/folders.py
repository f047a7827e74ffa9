"""Small dataset directories made with data/dataset.py, and what lies in a folder."""

from pathlib import Path

import dataset
import numpy as np


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its path in the folder, but locks and progress.json, whose settings name paths."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("progress.json", ".lock")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def make_dataset(root: Path, spec: dict, splits: dict) -> Path:
    """A dataset with this tokenizer.json and a shard of one document, whose tokens are given, for each split."""
    sha = dataset.write_json(root / "tokenizer.json", spec)
    files = {"tokenizer.json": dataset.file_entry(root / "tokenizer.json", sha)}
    for split, tokens in splits.items():
        path = root / f"pretrain/{split}_000000.bin"
        written = dataset.write_shard(path, np.array(tokens, np.uint16), tokenizer_sha256=sha)
        counts = {"tokens": len(tokens), "documents": 1, "text_bytes": len(tokens)}
        files[f"pretrain/{path.name}"] = {**counts, **dataset.file_entry(path, written)}
    dataset.write_dataset(root, {"name": "x", "sources": [], "tokenizer_sha256": sha, "files": files})
    return root
