"""Writes the files of an export for transformers."""

import json
import shutil
from pathlib import Path

import torch
from lib.command import RunError
from lib.export_tokenizer import Vocabulary
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(folder: Path, vocabulary: Vocabulary, context: int, **more: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json, with `more` and the chat template."""
    write_json(folder / "tokenizer.json", vocabulary.content)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.bos,
        "eos_token": vocabulary.end,
        "pad_token": vocabulary.pad,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    if vocabulary.template:
        more["chat_template"] = vocabulary.template
    write_json(folder / "tokenizer_config.json", settings | more)


def make_folder(out: Path) -> None:
    """A new folder, or an empty one. Raises: RunError"""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is not an empty folder; choose another --out or remove it")
    out.mkdir(parents=True, exist_ok=True)


def store_weights(path: Path, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes safetensors; scalars stay fp32, as in training, and signs int8."""
    stored = {}
    for name, tensor in tensors.items():
        keeps_dtype = ".scalars." in name or tensor.dtype == torch.int8
        stored[name] = (tensor if keeps_dtype else tensor.to(dtype)).contiguous().clone()
    try:
        save_file(stored, path, {"format": "pt"})
    except SafetensorError as error:
        raise RunError(f"cannot write {path} ({error}); free some space, remove {path.parent} and try again") from None
    shutil.copymode(path.with_name("tokenizer.json"), path)  # else only its owner could read it
