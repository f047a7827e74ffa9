"""Ranks all entries; writes the tables and plots of records/README.md and CURVES.md.

    python records/leaderboard.py

Nothing is written unless every entry verifies. README.md says how entries are ranked.
"""

import argparse
import os
from pathlib import Path

import entry
import files
import flags
import plots
import rules
import text
import tracks
from metrics import METRICS, loss_curve
from ranking import Standing, rank
from text import format_value

README = files.ROOT / "records" / "README.md"
QUOTED = files.ROOT / "records" / "quoted.json"
BEGIN = "<!-- written by records/leaderboard.py; do not edit -->"
END = "<!-- /written -->"
SHOWN = ("val_bpb", "train_seconds", "tokens", "tokens_per_second", "mfu", "peak_memory_gib")
TITLES = ["entry", "standing", "seeds", "val bpb", "sd", *(METRICS[key][0] for key in SHOWN[1:])]
FRACTIONS = (0.1, 0.25, 0.5, 1.0)  # of a run, in CURVES.md


# ==== README.md


def read_records() -> list[dict]:
    """All records, each with its name."""
    return [{**entry.read_record(folder), "name": folder.name} for folder in entry.folders()]


def entry_line(record: dict, standing: Standing | str) -> list[str]:
    """The cells of an entry under TITLES."""
    mean = {key: record["summary"][key]["mean"] for key in SHOWN}
    sd = record["summary"]["val_bpb"]["sd"]
    bpb, *metrics = (format(mean[key], METRICS[key][1]) for key in SHOWN)
    seeds = str(len(record["runs"]))
    return [link_to(record), str(standing), seeds, bpb, format_value(sd, ".5f"), *metrics]


def link_to(record: dict) -> str:
    return f"[{record['name']}](../baselines/{record['name']}/README.md)"


def quote_line(quote: dict) -> list[str]:
    """The cells of a quoted figure under TITLES."""
    metrics = [format_value(quote.get(key), METRICS[key][1]) for key in SHOWN[1:]]
    return [quote["what"], "quoted", "", format_value(quote.get("val_bpb"), ".4f"), "", *metrics]


def leaderboard() -> str:
    """The generated part of records/README.md, markers included."""
    tracks_json = tracks.read()
    quotes = files.read_json(QUOTED)
    records = read_records()
    tracks_by_name = {record["name"]: tracks.tracks_of(record, tracks_json) for record in records}
    blocks = []

    def is_other(pair: tuple[str, dict]) -> bool:
        return pair[1]["dataset"] != tracks_json["main_dataset"]

    # What everyone can repeat comes first.
    for name, track in sorted(tracks_json["tracks"].items(), key=is_other):
        mine = [record for record in records if name in tracks_by_name[record["name"]]]
        if not mine:
            continue
        lines = [entry_line(record, standing) for record, standing in rank(mine, track)]
        lines += [quote_line(quote) for quote in quotes["rows"] if quote["track"] == name]
        blocks.append(f"### {name}\n\n{about(track, tracks_json)}\n\n{text.table(TITLES, lines, 2)}")
    if rest := [record for record in records if not tracks_by_name[record["name"]]]:
        lines = [entry_line(record, "no track") for record in rest]
        blocks.append(f"### Entries without a track\n\n{text.table(TITLES, lines, 2)}")
    taken = {name for names in tracks_by_name.values() for name in names}
    blocks.append(open_tracks(tracks_json, taken))
    return "\n\n".join([BEGIN, *blocks, other_projects(quotes), END])


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
    return f"### Tracks without an entry\n\nTheir limits are open until three seeds have run.\n\n{table}"


def other_projects(quotes: dict) -> str:
    """Speeds of other projects, which quoted.json quotes."""
    lines = []
    for quote in quotes["speeds"]:
        hardware = f"{quote['num_devices']} x {quote['device']}"
        more = [quote.get(key, "") for key in ("mfu", "memory", "start")]
        lines.append([quote["what"], hardware, quote["speed"], *more])
    titles = ["training speed, quoted", "hardware", "tokens/s", "MFU", "peak memory", "start to first step"]
    return f"### Other projects\n\n{quotes['source']}\n\n{text.table(titles, lines, len(titles))}"


# ==== CURVES.md and plots: today's entries


def current_entries() -> dict[str, dict]:
    """The newest entry of each args file that still sets the same; the main dataset comes first."""
    current = {}
    for record in sorted(read_records(), key=last_start):
        args = record["args"]
        if args:
            paths = files.BASELINES / record["name"] / args, files.ROOT / "runs" / args
            then, now = (settings(path) for path in paths)
            current |= {args: record} if then | new_settings(now, record) == now else {}
    main_dataset = tracks.read()["main_dataset"]

    def order(args: str) -> tuple[bool, str]:
        return current[args]["dataset"]["name"] != main_dataset, args

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


def rows_of(dataset: str) -> list[plots.Row]:
    """A row for each of them on a dataset, named by what its args file adds to that."""
    rows = []
    for args, record in current_entries().items():
        if record["dataset"]["name"] == dataset:
            row = plots.record_row(files.BASELINES / record["name"])
            row.name = args.removesuffix(".args").partition("_")[2] or "small"
            rows.append(row)
    return rows


def curves() -> str:
    """The generated part of CURVES.md, markers included: training loss of today's entries."""
    blocks = [BEGIN]
    for args, record in current_entries().items():
        curve = loss_curve(entry.read_logs(files.BASELINES / record["name"], record))
        lines = []
        for fraction in FRACTIONS:
            row = min(curve, key=lambda row: abs(row["tokens"] - fraction * curve[-1]["tokens"]))
            loss = f"{row['loss']:.3f}", format_value(row["loss_sd"], ".3f"), f"{row['bpb']:.3f}"
            lines.append([f"{fraction:.0%}", str(row["step"]), f"{row['tokens'] / 1e6:.1f} M", *loss])
        table = text.table(["of the run", "step", "tokens", "loss", "sd", "bpb"], lines, 1)
        bpb, seconds, _, speed, _, memory = (record["summary"][key]["mean"] for key in SHOWN)
        hardware = f"{record['hardware']['num_devices']} x {record['hardware']['device']}"
        result = f"{bpb:.4f} val bpb in {seconds:.1f} s, {speed:,.0f} tokens/s, {memory:.1f} GiB"
        seeds = f"{len(record['runs'])} seeds on {hardware}: {result}"
        blocks.append(f"## @runs/{args}\n\n{link_to(record)}, {seeds}.\n\n{table}")
    return "\n\n".join([*blocks, END])


def draw() -> list[Path]:
    """Plots today's entries, B34 beside other projects, and losses. Returns the files."""
    main_dataset = tracks.read()["main_dataset"]
    quotes = files.read_json(QUOTED)
    ours = README.with_name("curves.png")
    others = README.with_name("head_to_head.png")
    losses = README.with_name("training.png")
    rows = rows_of(main_dataset)
    panels = {
        "B34: 34 M tokens of prose": (rows_of("b34"), quotes["rows"]),
        "94 M tokens of prose": ([], quotes["head_to_head"]),
    }
    plots.draw_today(panels, others)
    if not rows:
        return [others]
    plots.draw_today({f"{main_dataset.upper()}: 34 M tokens of Python": (rows, [])}, ours)
    plots.draw_rows(rows, losses)
    return [ours, others, losses]


# ==== the command


def write() -> None:
    """Writes pages and plots. Raises UserError if an entry does not verify."""
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


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args(argv)
    write()


if __name__ == "__main__":
    main()
