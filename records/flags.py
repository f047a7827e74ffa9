"""Flags of a training run: the words of a command line or of an args file.

Scripts up to 2026-11-27 take a field of their Config as `--set muon_lr=0.03`, later ones as
`--muon-lr 0.03`. Frozen entries keep the flags and the script they ran with, so the tools read
both; what a flag means, a script's parser says.
"""

import argparse
import re
import shlex
from pathlib import PurePath

# What belongs to one run rather than to its recipe: flags, and fields of the Config.
RUN_FLAGS = ("--data", "--run-dir", "--seed", "--wandb", "--resume")
RUN_FIELDS = ("data", "seed", "wandb")
# These may differ from run to run, from start to start, and from an args file.
INTERVAL_FLAGS = ("--eval-every", "--save-every", "--log-every")
INTERVAL_FIELDS = ("eval_every", "save_every", "log_every")
# What an entry may give beside its args file. Every other flag overrides the recipe.
LENGTH_FLAGS = ("--steps", "--tokens")
FREE_FLAGS = (
    *LENGTH_FLAGS, "--micro-batch-tokens", "--attention", "--dtype", "--no-compile", "--no-cuda-graphs",
    "--keep-checkpoints",
)  # fmt: skip

# Fields of the Config that had another name up to 2026-11-27.
RENAMED = {
    "ahead": "mtp_weights",
    "ahead_until": "mtp_until",
    "fewest_packs": "min_packs",
    "pack_docs": "max_docs_per_pack",
    "mix_width": "mudd_width",
}


def parse_args_file(text: str) -> list[str]:
    """The flags of an args file, read as the training script does: quotes as in a shell."""
    return shlex.split(text.removeprefix("\ufeff"), comments=True)


def drop_flags(flags: list[str], names: tuple[str, ...]) -> list[str]:
    """Flags without those named and their values; --resume has none."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in names:
        parser.add_argument(name, **({"action": "store_true"} if name == "--resume" else {}))
    return parser.parse_known_args(flags)[1]


def entry_flags(flags: list[str]) -> list[str]:
    """The flags that an entry states: without those of one run and folders of args files."""
    words = drop_flags(flags, RUN_FLAGS)
    return ["@" + PurePath(word[1:]).name if word.startswith("@") else word for word in words]


def recipe_flags(flags: list[str]) -> list[str]:
    """The flags of an entry without intervals of logging, validation and saving."""
    return drop_flags(entry_flags(flags), INTERVAL_FLAGS)


def flag_names(words: list[str]) -> list[str]:
    """The names of flags: ["--steps=9", "--seed", "1"] gives ["--steps", "--seed"]."""
    return [word.split("=")[0] for word in words if word.startswith("--")]


def config_names(config: dict) -> dict:
    """A Config with current names instead of those that were renamed."""
    return {RENAMED.get(name, name): value for name, value in config.items()}


def parse_settings(words: list[str]) -> dict[str, list[str | float]]:
    """What flags of the old or the new kind set, by the current names of the Config.

    `--set ahead=(1.0,0.5)` and `--mtp-weights 1,0.5` both give {"mtp_weights": [1.0, 0.5]}.
    """
    out = {}
    words = list(words)
    while words:
        name, equals, value = words.pop(0).removeprefix("--").partition("=")
        if name == "set":
            name, equals, value = (value or words.pop(0)).partition("=")
        elif not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not equals:
            value = str(not name.startswith("no-"))
            name = name.removeprefix("no-")
        name = name.replace("-", "_")
        out[RENAMED.get(name, name)] = parse_values(value)
    return out


def parse_values(text: str) -> list[str | float]:
    """The numbers and words of a value, without the brackets of tuples and lists."""
    out = []
    for word in re.findall(r"[^\s,()\[\]]+", text):
        try:
            out.append(float(word))
        except ValueError:
            out.append(word)
    return out
