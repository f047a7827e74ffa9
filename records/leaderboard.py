"""Ranks all entries; writes the tables and plots of records/README.md and CURVES.md.

    python records/leaderboard.py

Nothing is written unless every entry verifies. README.md says how entries are ranked.
"""

import argparse
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import entry
import files
import flags
import plots
import rules
import text
import tracks
from metrics import METRICS, loss_curve, read_log
from ranking import Kind, Standing, rank
from text import format_value

sys.path.insert(0, str(Path(__file__).parent / "rivals"))
import rivals

README = files.ROOT / "records" / "README.md"
BEGIN = "<!-- written by records/leaderboard.py; do not edit -->"
END = "<!-- /written -->"
SHOWN = ("val_bpb", "train_seconds", "tokens", "peak_memory_gib")
TITLES = ["entry", "standing", "seeds", "val bpb", "sd", *(METRICS[key][0] for key in SHOWN[1:])]
BEST_TITLES = ["tracks", "GPU", "record in bits per byte", "record in seconds to a target"]
NOT_PUBLISHED = ("b34", "b34-remade")  # text that nobody else has, whose records only the folded tables show
FRACTIONS = (0.1, 0.25, 0.5, 1.0)  # of a run, in CURVES.md
# Our run in curves.png: its name there, its log and its GPU, since seconds of different GPUs do not compare. It has an
# n-gram table of record 89's size.
BESIDE_RIVALS = ("train_small.py", "other_runs/p34_table_of_record_89_decay_seed0.jsonl", "NVIDIA H200")
# In tokens.png beside entries.
SINGLE_RUNS = (("small", "first_chat/base/log.jsonl"), ("medium", "other_runs/p400_medium.jsonl"))


# ==== README.md


def read_records() -> list[dict]:
    """All records, each with its name."""
    return [{**entry.read_record(folder), "name": folder.name} for folder in entry.folders()]


def entry_line(record: dict, standing: Standing | str) -> list[str]:
    """The cells of an entry under TITLES."""
    summary = record["summary"]
    figures = [format(summary[key]["mean"], METRICS[key][1]) for key in SHOWN]
    figures.insert(1, format_value(summary["val_bpb"]["sd"], ".5f"))
    return [link_to(record), str(standing), str(len(record["runs"])), *figures]


def link_to(record: dict, shown: str | None = None) -> str:
    """A link to an entry, and the names in a line "Made by NAMES." of its README.md."""
    page = (files.BASELINES / record["name"] / "README.md").read_text(encoding="utf-8")
    made_by = re.search(r"^Made by (.+?)\.?$", page, re.M)
    link = f"[{shown or record['name']}](../baselines/{record['name']}/README.md)"
    return f"{link} by {made_by[1]}" if made_by else link


def leaderboard() -> str:
    """The generated part of records/README.md, with its markers: records on published text, and folded all entries."""
    tracks_json = tracks.read()
    records = read_records()
    tracks_by_name = {record["name"]: tracks.tracks_of(record, tracks_json) for record in records}
    pairs = {}  # p34-small: the standings of its tracks p34-small-bpb and p34-small-seconds
    for name, track in tracks_json["tracks"].items():
        if mine := [record for record in records if name in tracks_by_name[record["name"]]]:
            pairs.setdefault(name.rpartition("-")[0], {})[name] = rank(mine, track)

    def newest(pair: str) -> str:
        standings = [each for ranked in pairs[pair].values() for each in ranked]
        return max(entry.day_of(record) for record, _ in standings)

    def first_track(pair: str) -> dict:
        return tracks_json["tracks"][next(iter(pairs[pair]))]

    def is_published(pair: str) -> bool:
        return first_track(pair)["dataset"] not in NOT_PUBLISHED

    def comes_late(pair: str) -> tuple[bool, bool, bool]:
        """What nobody else can repeat, other text than that of most entries, and shapes with tracks of their own."""
        track = first_track(pair)
        return not is_published(pair), track["dataset"] != tracks_json["main_dataset"], "config" in track

    best = []
    blocks = []
    for pair in sorted(sorted(pairs, key=newest, reverse=True), key=comes_late):
        parts = []
        for name, standings in pairs[pair].items():
            lines = [entry_line(record, standing) for record, standing in standings]
            rule = about(tracks_json["tracks"][name], tracks_json)
            parts.append(f"**{name}**: {rule}\n\n{text.table(TITLES, lines, 2)}")
        gpu = gpu_of(first_track(pair)["hardware"]["device"])
        blocks.append(fold(f"{pair}, {gpu}", "\n\n".join(parts)))
        cells = best_cells(pairs[pair], tracks_json)
        if is_published(pair) and any(cells):
            best.append([pair, gpu, *cells])
    if rest := [record for record in records if not tracks_by_name[record["name"]]]:
        lines = [entry_line(record, "no track") for record in rest]
        blocks.append(fold("Entries without a track", text.table(TITLES, lines, 2)))
    taken = {name for names in tracks_by_name.values() for name in names}
    table = text.table(BEST_TITLES, best, len(BEST_TITLES))
    entries = fold("All entries, by track", "\n\n".join(blocks))
    return "\n\n".join([BEGIN, table, entries, open_tracks(tracks_json, taken), END])


def best_cells(ranked: dict[str, list], tracks_json: dict) -> list[str]:
    """The records of a pair of tracks, in bits per byte and in seconds to the target; empty where there is none."""
    cells = []
    for name, standings in ranked.items():
        track = tracks_json["tracks"][name]
        metric = track["ranked_by"]
        held = [record for record, standing in standings if standing.kind is Kind.RECORD]
        cell = link_to(held[0], format(held[0]["summary"][metric]["mean"], METRICS[metric][1])) if held else ""
        if held and metric == "train_seconds":
            cell += f" to {track['target_bpb']:.3f} bpb"
        cells.append(cell)
    return cells


def gpu_of(device: str) -> str:
    """A device's name, shortened to "H100" for "NVIDIA H100 80GB HBM3"."""
    return device.split()[1] if device.startswith("NVIDIA ") else device


def fold(title: str, body: str) -> str:
    """A block of Markdown that a click opens."""
    return f"<details>\n<summary>{title}</summary>\n\n{body}\n\n</details>"


def about(track: dict, tracks_json: dict) -> str:
    """Rule, dataset, script and hardware of a track."""
    hardware = track["hardware"]
    gpus = f"{track['class']}, {hardware['num_devices']} x {hardware['device']}"
    fingerprint = tracks_json["datasets"][track["dataset"]]["fingerprint"]
    data = f"Dataset {track['dataset']}, fingerprint {fingerprint[:12]}"
    return f"{tracks.rule_text(track)} {data}; `train_{track['script']}.py` on {gpus}."


def open_tracks(tracks_json: dict, taken: set[str]) -> str:
    """The tracks that no entry is on, and the commands for a first one."""
    lines = []
    for name, track in tracks_json["tracks"].items():
        if name not in taken and track["ranked_by"] == "val_bpb":
            made_by = tracks_json["datasets"][track["dataset"]]["made_by"]
            both = name.removesuffix("-bpb")
            lines.append([f"{both}-bpb, {both}-seconds", f"`{made_by}`", f"`{track['train']}`"])
    if not lines:
        return "Every track has an entry."
    table = text.table(["tracks", "makes the dataset", "trains"], lines, 3)
    return fold("Tracks without an entry", f"Their limits are open until three seeds have run.\n\n{table}")


# ==== CURVES.md and plots: today's entries


def current_entries() -> dict[str, dict]:
    """The newest entry of each args file that still sets the same; the main dataset comes first."""
    current = {}
    for record in sorted(read_records(), key=last_start):
        if args := record["args"]:
            then = settings(files.BASELINES / record["name"] / args)
            now = settings(files.ROOT / "runs" / args)
            if then | new_settings(now, record) == now:
                current[args] = record
    main_dataset = tracks.read()["main_dataset"]
    order = lambda args: (current[args]["dataset"]["name"] != main_dataset, args)
    return {args: current[args] for args in sorted(current, key=order)}


def settings(path: Path) -> dict[str, list]:
    """What an args file sets."""
    return flags.parse_settings(flags.parse_args_file(path.read_text(encoding="utf-8")))


def new_settings(now: dict, record: dict) -> dict:
    """Of an args file's settings, those with the entry's own values; a field that it did not have is off."""
    config = flags.config_names(record["config"] or {})
    return {name: value for name, value in now.items() if flags.parse_values(str(config.get(name, ""))) == value}


def last_start(record: dict) -> str:
    """The time of the last start of an entry's runs; of format 1 only the day is known."""
    runs = entry.read_run_files(files.BASELINES / record["name"])
    dates = [start["date"] for run in runs for start in run["starts"]]
    return max(dates, default=entry.day_of(record))


def name_of(args: str) -> str:
    """What an args file adds to the name of its dataset: "medium" for p34_medium.args, "small" if nothing."""
    return args.removesuffix(".args").partition("_")[2] or "small"


def rows_of(dataset: str) -> list[plots.Row]:
    """A row for each of the newest entries on a dataset."""
    rows = []
    for args, record in current_entries().items():
        if record["dataset"]["name"] == dataset:
            row = plots.record_row(files.BASELINES / record["name"])
            row.name = name_of(args)
            rows.append(row)
    return rows


def curves() -> str:
    """The generated part of CURVES.md, markers included: training loss of the newest entries."""
    blocks = [BEGIN]
    for args, record in current_entries().items():
        curve = loss_curve(entry.read_logs(files.BASELINES / record["name"], record))
        lines = []
        for fraction in FRACTIONS:
            row = min(curve, key=lambda row: abs(row["tokens"] - fraction * curve[-1]["tokens"]))
            loss = f"{row['loss']:.3f}", format_value(row["loss_sd"], ".3f"), f"{row['bpb']:.3f}"
            lines.append([f"{fraction:.0%}", str(row["step"]), f"{row['tokens'] / 1e6:.1f} M", *loss])
        table = text.table(["of the run", "step", "tokens", "loss", "sd", "bpb"], lines, 1)
        mean = {key: summary["mean"] for key, summary in record["summary"].items()}
        hardware = f"{record['hardware']['num_devices']} x {record['hardware']['device']}"
        result = f"{mean['val_bpb']:.4f} val bpb in {mean['train_seconds']:.1f} s, "
        result += f"{mean['tokens_per_second']:,.0f} tokens/s, {mean['peak_memory_gib']:.1f} GiB"
        seeds = f"{len(record['runs'])} seeds on {hardware}: {result}"
        blocks.append(f"## @runs/{args}\n\n{link_to(record)}, {seeds}.\n\n{table}")
    return "\n\n".join([*blocks, END])


def draw() -> list[Path]:
    """Draws our run beside rivals, the newest entries on the main dataset, and results by tokens. Returns the files."""
    dataset = tracks.read()["main_dataset"]
    rows = rows_of(dataset)
    if not rows:
        return []
    names = ("curves", "training", "tokens")
    today, losses, tokens = (README.with_name(f"{name}.png") for name in names)
    label, log, device = BESIDE_RIVALS
    title = f"{dataset.upper()}, one run each on an {gpu_of(device)}: lower is better, further left is faster"
    plots.draw_seconds([our_curve(label, README.parent / log), *rival_curves(dataset, device)], title, today)
    plots.draw_rows(rows, losses)
    plots.draw_tokens(token_curves(), tokens)
    return [today, losses, tokens]


def our_curve(label: str, log: Path) -> plots.Curve:
    """The validations of a run of ours."""
    validations = [line for line in read_log(log) if "val_bpb" in line]
    return plots.Curve(label, plots.BLUE, [(line["train_seconds"], line["val_bpb"]) for line in validations])


def rival_curves(dataset: str, device: str) -> list[plots.Curve]:
    """Other projects in curves.png, each with its best settings among those that validated during training."""
    curves = defaultdict(list)
    for (name, gpu, _), same in rivals.grouped(README.parent / "rivals" / "logs").items():
        settings = same[0]["settings"]
        # nanochat also validates before its first step.
        runs = [[(seconds, bpb) for steps, seconds, bpb in run["validations"] if steps] for run in same]
        longest = max(runs, key=len)
        if (name, gpu) == (dataset, device) and len(longest) > 1:
            color = plots.ORANGE if settings["rival"] == "modded" else plots.GREY
            curves[settings["rival"]].append(plots.Curve(rivals.short_name(settings), color, longest))

    return [min(settings, key=lambda curve: curve.points[-1][1]) for settings in curves.values()]


def token_curves() -> list[plots.Curve]:
    """Results of both scripts over training tokens: what scored the text that the main dataset scores."""
    tracks_json = tracks.read()
    scored = tracks_json["datasets"][tracks_json["main_dataset"]]["scored"]["sha256"]
    results = {"small": [], "medium": []}
    for args, record in current_entries().items():
        if name_of(args) in results and record["scored"]["sha256"] == scored:
            mean = {key: record["summary"][key]["mean"] for key in ("tokens", "val_bpb")}
            results[name_of(args)].append((mean["tokens"], mean["val_bpb"]))
    for name, log in SINGLE_RUNS:
        last = read_log(README.parent / log)[-1]
        if last["scored"]["sha256"] == scored:
            results[name].append((last["tokens"], last["val_bpb"]))
    colors = {"small": plots.BLUE, "medium": plots.ORANGE}
    return [plots.Curve(f"train_{name}.py", colors[name], sorted(each)) for name, each in results.items() if each]


# ==== the command


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args(argv)
    for folder in entry.folders():
        if problems := rules.problems(folder):
            raise files.UserError(f"{folder.name} does not verify ({problems[0]}), so the leaderboard stays as it was")
    for page, part in ((README, leaderboard()), (README.with_name("CURVES.md"), curves())):
        old = page.read_text(encoding="utf-8")
        new = old[: old.index(BEGIN)] + part + old[old.index(END) + len(END) :]
        files.write_atomic(page, new)
        print(f"{os.path.relpath(page)}: {'is up to date' if new == old else 'updated'}")
    for path in draw():
        print(f"{os.path.relpath(path)}: written")


if __name__ == "__main__":
    main()
