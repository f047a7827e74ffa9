"""What the commands share: error messages, an exit code, and flags from settings. It needs no PyTorch."""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path


class RunError(Exception):
    """Something the user can fix. The message is one sentence: what is wrong, and what to do."""


def explain_missing_package(kind: type, error: BaseException, trace) -> None:
    """One sentence in place of a traceback; a sys.excepthook, as commands import packages before run_command()."""
    if kind is ModuleNotFoundError:
        way = "activate the .venv that has it, or run pip install -r requirements.txt"
        print_note(f"error: the package {error.name} is not installed in {sys.prefix}; {way}")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = explain_missing_package


def first_line(error: Exception) -> str:
    """What an error says, for a message of one sentence."""
    return next(iter(str(error).splitlines()), repr(error))


def print_note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def check_sampling(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses values of --temperature, --top-k (None: the default) and --top-p that cannot be sampled with."""
    if not 0 <= args.temperature < math.inf or (args.top_k or 0) < 0 or not 0 < args.top_p <= 1:
        parser.error("--temperature and --top-k must be at least 0, --top-p above 0 and at most 1")


def is_main() -> bool:
    """Whether this is the first process of torchrun, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints in one process only."""
    if is_main():
        print(text, flush=True)


def error_message(error: Exception) -> str:
    """What to print for an error that the user can fix, "" for a fault of the program."""
    # Training scripts, also those in run directories, stand alone, so each has a UserError of its own.
    if isinstance(error, RunError) or type(error).__name__ == "UserError":
        return str(error)

    torch = sys.modules.get("torch")  # not imported here, as it takes seconds
    if isinstance(error, MemoryError) or re.search("out of memory|allocate memory", str(error)):  # of any device
        return "the device ran out of memory; use smaller batches, see --help and runs/TROUBLESHOOTING.md"
    is_lost = torch and isinstance(error, torch.distributed.DistError)  # another process has ended
    if is_lost or isinstance(error, OSError) or re.search("gloo|No space left", str(error)):
        return f"{first_line(error)}; fix that, then run the command again"
    return ""


def run_command(work: Callable[[], dict | None]) -> int:
    """Prints what work() returns as one JSON object on the last line, or its error; returns the exit code."""
    message = ""
    code = 0
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a console may lack letters of an answer
    # All of torchrun's variables or none: some may be left over, or come from another launcher.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(os.environ.get(name) for name in names):
        for name in names:
            os.environ.pop(name, None)
    try:
        result = work()
        if result is not None:
            say(json.dumps(result))
        sys.stdout.flush()
    except KeyboardInterrupt:
        message = "\nstopped"  # after what the command or the terminal has begun to print
        code = 130
    except BrokenPipeError:
        # The reader of the output, such as head, has ended. What Python still writes at its end is discarded.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception as error:
        message = error_message(error)
        code = 1
        if not message:
            raise
        message = f"error: {message}"
    finally:
        dist = sys.modules.get("torch.distributed")
        if dist and dist.is_initialized():
            dist.destroy_process_group()

    if message:
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            # torchrun ends with a report, whose last lines are the message of the process that failed first.
            reply = {"message": message.strip(), "timestamp": int(time.time())}
            Path(error_file).write_text(json.dumps(reply), encoding="utf-8")
        if not is_main():
            time.sleep(3)  # by then torchrun has ended this process, and the message of the first one is enough
        print_note(message)
    return code


def add_flags(parser: argparse.ArgumentParser, fields: dict, prefix: str = "") -> None:
    """A flag for each field of a pydantic model that is described; check_settings converts its value."""
    for name, field in fields.items():
        if field.description:
            default = "required" if field.is_required() else field.default
            text = field.description if default is None else f"{field.description} [{default}]"
            form = {"action": argparse.BooleanOptionalAction} if field.annotation is bool else {"metavar": "X"}
            flag = f"--{prefix}{name.replace('_', '-')}"
            parser.add_argument(flag, dest=prefix + name, help=text.replace("%", "%%"), **form)


def read_flags(argv: list[str] | None, doc: str, add_new: Callable) -> argparse.Namespace:
    """The flags that were given, with what train() of the training scripts expects beside them.

    Args: doc of the command; add_new adds the flags of a new run to a parser. A run that is resumed keeps its own.
    """
    flags = sys.argv[1:] if argv is None else list(argv)
    resume = "--resume" in flags
    parser = argparse.ArgumentParser(
        description=doc.splitlines()[0], argument_default=argparse.SUPPRESS, allow_abbrev=False
    )
    add = parser.add_argument
    add("--run-dir", type=Path, required=resume, metavar="DIR", help="directory of the run (default: under out/)")
    add("--resume", action="store_true", help="continue the run in --run-dir, with its settings")
    if not resume:
        add_new(parser)
    args, unknown = parser.parse_known_args(flags, argparse.Namespace(flags=flags, resume=resume, run_dir=None))
    if unknown:
        hint = "; a resumed run keeps its settings, so omit them" if resume else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return args


def check_settings(model: type, values: dict):
    """A pydantic model of values. Raises: RunError, about the first that is wrong"""
    try:
        return model(**values)
    except ValueError as error:
        # An unknown name comes first: it may be a required one, misspelled.
        first = min(error.errors(), key=lambda error: error["type"] != "extra_forbidden")
    name = ".".join(map(str, first["loc"][:2])).replace("_", "-")
    value = "missing" if first["type"] == "missing" else repr(first["input"])
    raise RunError(f"--{name} is {value}: {first['msg'].lower()}; see --help")
