"""What a training script and its flags ask for, read from their text. Nothing of a script is executed.

A record states the Config of its runs. check_config() compares it with the defaults that the class Config of the
record's own script holds, changed by the args file and the flags, so that no number of the recipe can be misstated.
"""

import ast
import functools
import json
import operator
import re
from pathlib import PurePath

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
# A script is a stranger's text: 9 ** 9 ** 9 must not be computed, nor ((9 ** 64) ** 64) ** 64.
LARGEST_POWER = 64
LARGEST_BASE = 10**6
# Flags for the place and the seed of a run, and whether a value follows. They are not part of a record.
PLACE_FLAGS = {"--data": 1, "--run-dir": 1, "--seed": 1, "--wandb": 1, "--resume": 0}
PLACE_FIELDS = ("data", "seed", "wandb")  # the same in the Config
INTERVALS = ("--eval-every", "--save-every", "--log-every")  # may replace those of an args file
INTERVAL_FIELDS = (
    "eval_every",
    "save_every",
    "log_every",
)  # free, also from start to start of a run
# The one --set that is free. Scripts up to 2026-11-22 scored CORE at the end of training; not each seed needs it.
NO_CORE = "core_items=-1"
# Flags with a field of the Config that has their name.
FIELD_FLAGS = (
    "--tokens", "--eval-every", "--save-every", "--log-every", "--micro-batch-tokens", "--attention", "--dtype",
)  # fmt: skip


class Unknown(Exception):
    """A value that cannot be read off the text of a script."""


# ---- flags and args files


def args_words(text: str) -> list[str]:
    """The flags of an args file, as the training script reads them."""
    return [word for line in text.splitlines() for word in line.split("#")[0].split()]


def values_of(words: list[str], flag: str) -> list[str]:
    """The values that a flag is given, in order: `--flag value` or `--flag=value`."""
    out = []
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            out.append(words[index + 1])
        elif word.startswith(f"{flag}="):
            out.append(word[len(flag) + 1 :])
    return out


def overrides(words: list[str]) -> list[str]:
    """The KEY=VALUE of each --set, in order."""
    return values_of(words, "--set")


def flag_names(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if word.startswith("--")}


def strip(flags: list[str]) -> list[str]:
    """Flags of the recipe: those given, without the command, seeds, places, NO_CORE and the folder of an args file."""
    out = []
    skip = False
    for word, following in zip(flags, [*flags, ""][1:], strict=True):
        if skip:
            skip = False
            continue
        name, _, value = word.partition("=")
        if name == "--set" and NO_CORE in (value, "" if value else following):
            skip = not value
        elif name in PLACE_FLAGS:
            skip = PLACE_FLAGS[name] == 1 and not value
        elif word.startswith("@"):
            out.append("@" + PurePath(word[1:]).name)
        elif word != "pretrain":
            out.append(word)
    return out


def recipe_flags(flags: list[str]) -> list[str]:
    """The same without intervals of logging, validation and saving."""
    out = []
    skip = False
    for word in strip(flags):
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        if name in INTERVALS:
            skip = not equals
        else:
            out.append(word)
    return out


# ---- the Config of a script


def literal(node: ast.AST):
    """Constants, tuples and arithmetic such as 1 / 3, in the form of JSON. Raises Unknown for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float | str | None):
        return node.value
    if isinstance(node, ast.Tuple | ast.List):
        return [literal(item) for item in node.elts]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = literal(node.operand)
        if isinstance(value, int | float):
            return -value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = literal(node.left)
        right = literal(node.right)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        small = numbers and abs(left) <= LARGEST_BASE and abs(right) <= LARGEST_POWER
        if numbers and (small or not isinstance(node.op, ast.Pow)):
            try:
                return OPERATORS[type(node.op)](left, right)
            except (ArithmeticError, ValueError):
                pass
    raise Unknown(f"{ast.unparse(node)[:80]} is no plain value")


@functools.lru_cache(maxsize=16)
def config_class(text: str) -> ast.ClassDef:
    """The class Config of a script: its line `class Config` and all indented lines behind it."""
    found = re.findall(r"^class Config\b.*\n(?:(?:[ \t].*)?\n)+", text, re.M)
    if len(found) != 1:
        raise Unknown(f"it has {len(found)} classes Config, one is expected")
    try:
        return ast.parse(found[0]).body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unknown("its class Config is not Python") from None


def defaults(text: str) -> dict:
    """{field: default} of the class Config of a script."""
    out = {}
    for node in config_class(text).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if node.value is None:
                raise Unknown(f"its field {node.target.id} has no default")
            out[node.target.id] = literal(node.value)
    return out


def has_rules(text: str) -> bool:
    """Whether the Config fills in fields by itself: those that are 0 then stand for a rule of the script."""
    body = config_class(text).body
    return any(isinstance(n, ast.FunctionDef) and n.name == "__post_init__" for n in body)


def parse_value(text: str, default):
    """A value of --set or of a flag, as the script reads it for a field with this default."""
    if isinstance(default, str):
        return text
    try:
        value = literal(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unknown(f"{text[:80]} is no value") from None
    if isinstance(default, float) and type(value) is int:
        return float(value)
    return value


def expected_config(script: str, words: list[str]) -> dict:
    """The Config that a script builds from flags, without fields that it derives by a rule.

    Args: script, its text; words, all flags in their order, those of the args file included
    """
    config = defaults(script)
    for text in overrides(words):
        key, _, value = text.partition("=")
        if key not in config:
            raise Unknown(f"--set {key} names no field of its Config")
        config[key] = parse_value(value, config[key])
    for flag in FIELD_FLAGS:
        key = flag[2:].replace("-", "_")
        if key in config and (given := values_of(words, flag)):
            config[key] = parse_value(given[-1], config[key])
    if "--no-compile" in words:
        config["compile"] = False
    steps = values_of(words, "--steps")
    ruled = has_rules(script)
    if steps and ruled and by_rule("stages", config["stages"]):
        del config["tokens"]  # the rule begins with the number of steps
    elif steps:
        packs = sum(row[0] * row[1] for row in config["stages"])
        config["tokens"] = round(int(steps[-1]) * packs * config["pack_tokens"])
    if ruled:
        config = {key: value for key, value in config.items() if not by_rule(key, value)}
    return {key: value for key, value in config.items() if key not in PLACE_FIELDS}


# Fields that a Config with rules may fill in; any other 0 is a 0.
RULED = ("width", "mlp_width", "tokens", "stages", "muon_lr", "adam_lr")


def by_rule(key: str, value) -> bool:
    if key == "stages":
        return any(row[1] == 0 for row in value) or not value
    return key in RULED and value == 0


def check_config(stated: dict, script: str, words: list[str], vocab_size: int) -> list[str]:
    """Fields of a stated Config that are not those which the script gives with these flags.

    A field that the script derives by a rule must be there; its value is compared between the runs, by
    records/add.py with the script itself, and by verify.py --rerun.
    """
    try:
        expected = expected_config(script, words)
        names = [key for key in defaults(script) if key not in PLACE_FIELDS]
    except (Unknown, TypeError, IndexError, KeyError) as error:
        return [f"the Config of the script cannot be read ({error})"]
    if "vocab_size" in expected:
        expected["vocab_size"] = vocab_size  # the tokenizer's takes the place of the default
    missing = [key for key in names if key not in stated and key != "core_items"]  # see NO_CORE
    out = [f"config.{key} is missing, the script has such a field" for key in missing]
    for key, value in stated.items():
        if key not in names:
            out.append(f"config.{key} is no field of the script's Config")
        elif key in INTERVAL_FIELDS:
            continue
        elif key in expected and json.dumps(value) != json.dumps(expected[key]):
            out.append(
                f"config.{key} is stated as {value}, the script and its flags give {expected[key]}"
            )
    return out
