"""Prints the tracks that entries are ranked on (records/tracks.json), or adds two.

    python records/tracks.py
    python records/tracks.py add data/shards/p34 --dataset p34 --script small --tokens 34013184 \\
        --device "NVIDIA H200" --made-by "python data/pretrain.py --source pypi:p34 --out data/shards/p34" \\
        --train "python train_small.py @runs/p34.args" --first 2026-11-23_first-p34

`add` writes two tracks: fewest bits per byte for a number of tokens, and fewest seconds to a
target. Limits follow from the seeds of the entry given by --first. Without it they stay open until
the command is repeated with it.
"""

import argparse
import hashlib
import importlib
import json
import math
import re
import sys
from pathlib import Path
from statistics import fmean

import entry
import files
import flags
from files import UserError
from scipy import stats
from significance import ALPHA, p_below
from text import table

FILE = Path(__file__).with_name("tracks.json")
# Seconds of a run with fixed tokens over the first mean, so that bits are not bought with time.
MAX_TIME_RATIO = 1.1
TOKEN_TOLERANCE = 0.001  # by which a run of whole steps may pass the number of tokens
MIN_SEEDS = 3


def read() -> dict:
    """tracks.json, which describes itself under "about"."""
    return files.read_json(FILE)


# ==== limits


def target_of(values: list[float]) -> float:
    """The target that a first mean sets: the end of its one-sided 99 % interval, rounded up."""
    interval = stats.ttest_1samp(values, 0, alternative="less").confidence_interval(1 - ALPHA)
    return math.ceil(interval.high * 1000) / 1000


def limit_of(seconds: list[float]) -> float:
    """The limit of time that a first mean sets: 1.1 times the mean, rounded up to 0.1 s."""
    return math.ceil(MAX_TIME_RATIO * fmean(seconds) * 10) / 10


# ==== which tracks an entry is on


def tracks_of(record: dict, tracks_json: dict) -> list[str]:
    """Names of the tracks with the entry's dataset, script, hardware and, if asked for, shape."""
    hardware = {key: record["hardware"][key] for key in ("device", "num_devices")}
    own = (record["dataset"]["fingerprint"], record["track"], hardware)

    def asked(track: dict) -> tuple:
        fingerprint = tracks_json["datasets"][track["dataset"]]["fingerprint"]
        return fingerprint, track["script"], track["hardware"]

    def has_shape(track: dict) -> bool:
        shape = flags.config_names(track.get("config", {}))
        config = flags.config_names(record["config"] or {})
        return shape == {key: config.get(key) for key in shape}

    pairs = tracks_json["tracks"].items()
    return [name for name, track in pairs if asked(track) == own and has_shape(track)]


def scoring_problems(record: dict, config: dict, scored: dict | None, tracks_json: dict) -> list[str]:
    """Why an entry's val bpb is not that of its dataset's tracks, which fix what is scored."""
    out = []
    for dataset in tracks_json["datasets"].values():
        if dataset["fingerprint"] != record["dataset"]["fingerprint"] or not dataset["scored"]:
            continue
        stated = {key: config.get(key) for key in ("max_seq_len", "val_tokens")} | (scored or {})
        # The hash of an early dataset is not known.
        wanted = {key: value for key, value in dataset["scored"].items() if value is not None}
        stated = {key: stated.get(key) for key in wanted}
        out += files.mismatches(wanted, stated, "scored", "the tracks of this dataset score")
    return out


def ineligible_because(record: dict, track: dict) -> str | None:
    """Why an entry is not ranked on a track of its dataset and hardware; None if it is."""
    runs = record["runs"]
    if len(runs) < MIN_SEEDS:
        return f"fewer than {MIN_SEEDS} seeds"
    if record.get("max_epochs", 1) > track["max_epochs"]:
        return "repeats text"
    if track["ranked_by"] == "train_seconds":
        if track["target_bpb"] is None:
            return "no target yet"
        p = p_below(entry.values(record, "val_bpb"), track["target_bpb"])
        return None if p is not None and p < ALPHA else "misses the target"
    if max(run["tokens"] for run in runs) > track["tokens"] * (1 + TOKEN_TOLERANCE):
        return "too many tokens"
    if track["max_seconds"] is None:
        return "no limit yet"
    seconds = fmean(entry.values(record, "train_seconds"))
    return "too slow" if seconds > track["max_seconds"] else None


def rule_text(track: dict) -> str:
    """What a track ranks by, and within which bounds, in a sentence."""
    if track["ranked_by"] == "val_bpb":
        seconds = track["max_seconds"]
        limit = f"at most {seconds:,.1f} training seconds" if seconds else "no limit of time yet"
        return f"Fewest bits per byte with {track['tokens']:,} tokens, {limit}."
    target = track["target_bpb"]
    bound = f"{target:.3f} with p < {ALPHA}" if target else "a target that is not set yet"
    return f"Fewest training seconds to a mean val bpb below {bound}."


def scored_text(script, folder: Path, max_seq_len: int, val_tokens: int) -> dict:
    """What the script validates on: targets with bytes, their bytes, a hash of the documents."""
    dataset = script.Dataset.open(folder)
    config = script.Config(max_seq_len=max_seq_len, val_tokens=val_tokens)
    digest = hashlib.sha256()
    targets = 0
    num_bytes = 0
    for tokens, _ in script.scored_documents(script.validation_documents(dataset, config), config):
        carried = dataset.tokenizer.token_bytes[tokens[1:]]
        digest.update(tokens.astype("<u2"))
        targets += int((carried > 0).sum())
        num_bytes += int(carried.sum())
    scored = {"targets": targets, "bytes": num_bytes, "sha256": digest.hexdigest()}
    return {**scored, "max_seq_len": max_seq_len, "val_tokens": val_tokens}


# ==== adding


def make_tracks(args: argparse.Namespace, dataset: dict) -> dict:
    """The two tracks that the command line describes, by name."""
    common = {
        "dataset": args.dataset,
        "script": args.script,
        "hardware": {"device": args.device, "num_devices": args.num_devices},
        "class": entry.device_class(args.device),
        "max_epochs": args.max_epochs,
        "train": args.train,
        **({"config": json.loads(args.config)} if args.config else {}),
        "limits_from": args.first.name if args.first else None,
    }
    limit = None
    target = None
    if args.first:
        record = entry.read_record(args.first)
        only_this = {"datasets": {args.dataset: dataset}, "tracks": {"new": common}}
        if not tracks_of(record, only_this) or len(record["runs"]) < MIN_SEEDS:
            hint = f"be of this dataset, script, GPU and number of GPUs, with at least {MIN_SEEDS} seeds"
            raise UserError(f"--first {args.first.name} sets no limits; the entry must {hint}")
        limit = limit_of(entry.values(record, "train_seconds"))
        target = target_of(entry.values(record, "val_bpb"))
    name = args.name or f"{args.dataset}-{args.script}"
    fewest_bits = {**common, "ranked_by": "val_bpb", "tokens": args.tokens, "max_seconds": limit}
    fewest_seconds = {**common, "ranked_by": "train_seconds", "target_bpb": target}
    return {f"{name}-bpb": fewest_bits, f"{name}-seconds": fewest_seconds}


def fill_open(old: dict, new: dict, what: str) -> dict:
    """old with its open entries filled in, if they do not contradict each other."""
    out = dict(old)
    for key, value in new.items():
        if old.get(key) is None:
            out[key] = value
        elif value is not None and old[key] != value:
            hint = "tracks are frozen, so choose another --dataset or --name"
            raise UserError(f"{what}: {key} is {old[key]} and would become {value}; {hint}")
    return out


def add(args: argparse.Namespace) -> None:
    """Writes the two tracks that flags describe. Raises UserError if tracks.json has others."""
    for flag, text in (("--dataset", args.dataset), ("--name", args.name or args.dataset)):
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", text):
            raise UserError(f"{flag} {text} must be lower-case words and digits joined by -, e.g. p34")
    sys.path.insert(0, str(files.ROOT))
    script = importlib.import_module(f"train_{args.script}")
    try:
        scored = scored_text(script, args.folder, args.max_seq_len, args.val_tokens)
    except script.UserError as error:
        raise UserError(str(error)) from None
    info = files.read_json(args.folder / "dataset.json")
    shards = [file for name, file in info["files"].items() if name.startswith("pretrain/train")]
    dataset = {
        "fingerprint": info["fingerprint"],
        "vocab_size": info["vocab_size"],
        "train_tokens": sum(file["tokens"] for file in shards),
        "made_by": args.made_by,
        "scored": scored,
    }
    held = dataset["train_tokens"]
    if args.tokens > held * args.max_epochs:
        raise UserError(f"--tokens {args.tokens:,} is more than the {held:,} that {args.folder} holds")
    tracks_json = read()
    old = tracks_json["datasets"].get(args.dataset, {})
    tracks_json["datasets"][args.dataset] = fill_open(old, dataset, args.dataset)
    for name, track in make_tracks(args, dataset).items():
        tracks_json["tracks"][name] = fill_open(tracks_json["tracks"].get(name, {}), track, name)
        print(f"{name}: {rule_text(tracks_json['tracks'][name])}")
    files.write_atomic(FILE, files.to_json(tracks_json))


def show() -> None:
    """Prints all tracks as a table."""
    tracks_json = read()
    rows = []
    for name, track in tracks_json["tracks"].items():
        fingerprint = tracks_json["datasets"][track["dataset"]]["fingerprint"]
        hardware = f"{track['hardware']['num_devices']} x {track['hardware']['device']}"
        rows.append([name, (fingerprint or "not made yet")[:12], hardware, rule_text(track)])
    print(table(["track", "dataset", "hardware", "rule"], rows, 4))


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(dest="command")
    flag = commands.add_parser("add", help="add two tracks for a dataset directory").add_argument
    flag("folder", type=Path, help="dataset directory")
    flag("--dataset", required=True, help="name in tracks.json, e.g. p34")
    flag("--script", required=True, choices=entry.SCRIPTS, help="training script")
    flag("--tokens", required=True, type=int, help="training tokens of the track with fixed tokens")
    flag("--device", required=True, help='GPU as config.json names it, e.g. "NVIDIA H200"')
    flag("--num-devices", type=int, default=1, help="number of GPUs (default 1)")
    flag("--made-by", help="command that makes the dataset")
    flag("--train", help="command that trains on the track")
    flag("--name", help="prefix of the two tracks' names (default DATASET-SCRIPT)")
    flag("--config", help="JSON object of fields that the Config of an entry must hold")
    flag("--first", type=entry.find, help="entry whose seeds set the limits")
    flag("--max-epochs", type=int, default=1, help="passes over the text (default 1)")
    flag("--max-seq-len", type=int, default=2048, help="tokens after which validation cuts a document")
    flag("--val-tokens", type=int, default=10_485_760, help="targets after which validation stops")
    args = parser.parse_args(argv)
    if args.command == "add":
        add(args)
    else:
        show()


if __name__ == "__main__":
    main()
