"""The leaderboard of records/README.md and its pictures, from baselines/ and tracks.json (compare.py --write)."""

import json
import os
from pathlib import Path
from statistics import fmean

import check
import recipe
import record as rec
import tracks

README = rec.ROOT / "records" / "README.md"
QUOTED = rec.ROOT / "records" / "quoted.json"
BEGIN = "<!-- leaderboard: written by records/compare.py --write; do not edit -->"
END = "<!-- /leaderboard -->"
SHOWN = ("val_bpb", "train_seconds", "tokens", "tokens_per_second", "mfu", "peak_memory_gib")
SMALL_GAIN = 0.05  # of the seconds: less counts only beside a rerun of the record before, rule 6
FAR = 1.1  # an entry whose bits per byte are this many times those of the best is not drawn
STYLES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))
MARKERS = "os^Dv*PX"
NOTE = (
    "Lines: loss of the training batches (mean over the seeds), in bits per byte by the average bytes of a token. "
    "Dots: validation, one a seed, counted on held-out text.\nThe two are of different text and are not compared with "
    "each other; only dots are ranked. Dashed: limits of the tracks."
)


# ---- standings


def in_order() -> list[dict]:
    """All records by day, and on one day each after the one that it is compared with."""
    records = {}
    for folder in sorted(p.parent for p in rec.BASELINES.glob("*/record.json")):
        records[folder.name] = {**rec.read_record(folder), "name": folder.name}

    def depth(record: dict, seen: tuple = ()) -> int:
        other = record["against"]
        if other not in records or other in seen:
            return 0
        return 1 + depth(records[other], (*seen, other))

    def key(record: dict) -> tuple:
        return day(record), depth(record), record["name"]

    return sorted(records.values(), key=key)


def day(record: dict) -> str:
    return record.get("date", record["name"][:10])


def same_recipe(record: dict, other: dict) -> bool:
    """Whether one is a rerun of the other: script, args file and flags are equal."""
    parts = []
    for r in (record, other):
        hashes = r["files"][r["script"]], r["files"].get(r["args"])
        parts.append((*hashes, recipe.recipe_flags(r["flags"])))
    return parts[0] == parts[1]


def is_better(values: list[float], others: list[float]) -> bool:
    test = rec.welch(values, others)
    return test["difference"] < 0 and test["p"] is not None and test["p"] < tracks.P


def beside_rerun(record: dict, best: dict, records: list[dict]) -> bool:
    """Rule 6: whether a new recipe names a run of the best one on its own day, and is faster than that too."""
    named = [r for r in records if r["name"] == record["against"]]
    if same_recipe(record, best) or not named:
        return False
    other = named[0]
    seconds = [[run["train_seconds"] for run in r["runs"]] for r in (record, other)]
    return same_recipe(other, best) and day(other) == day(record) and is_better(*seconds)


def rank(records: list[dict], track: dict) -> list[tuple[dict, str]]:
    """(record, its standing) on a track, best first, from its records in the order of time."""
    key = track["ranked_by"]
    best = None
    best_record = None
    count = 0
    ranked = []
    unranked = []
    for record in records:
        if why := tracks.refusal(record, track):
            unranked.append((record, why))
            continue
        values = [run[key] for run in record["runs"]]
        test = rec.welch(values, best) if best else None
        better = test and is_better(values, best)
        gain = -test["difference"] / fmean(best) if test else 1.0
        if better and key == "train_seconds" and gain < SMALL_GAIN:
            if not beside_rerun(record, best_record, records):
                why = (
                    "a rerun" if same_recipe(record, best_record) else f"{gain:.1%} without a rerun"
                )
                ranked.append((record, f"no record, {why}"))
                continue
        if test is None or better:
            best = values
            best_record = record
            count += 1
            p = f", p {rec.p_text(test['p'])}" if test else ""
            ranked.append((record, f"record {count}{p}"))
        else:
            ranked.append((record, f"no record, p {rec.p_text(test['p'])}"))

    def mean(pair: tuple[dict, str]) -> float:
        return fmean(run[key] for run in pair[0]["runs"])

    return sorted(ranked, key=mean) + sorted(unranked, key=mean)


# ---- text


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def entry_line(record: dict, standing: str) -> list[str]:
    mean = {key: record["summary"][key]["mean"] for key in SHOWN}
    sd = record["summary"]["val_bpb"]["sd"]
    figures = [format(mean[key], rec.FIGURES[key][1]) for key in SHOWN[1:]]
    link = f"[{record['name']}](../baselines/{record['name']}/README.md)"
    bpb = format(mean["val_bpb"], ".5f")
    return [link, standing, str(len(record["runs"])), bpb, cell(sd, ".5f"), *figures]


def quote_line(quote: dict) -> list[str]:
    figures = [cell(quote.get(key), rec.FIGURES[key][1]) for key in SHOWN[1:]]
    return [quote["what"], "quoted", "", cell(quote.get("val_bpb"), ".4f"), "", *figures]


def titles() -> list[str]:
    return ["entry", "standing", "seeds", "val bpb", "sd", *(rec.FIGURES[k][0] for k in SHOWN[1:])]


def leaderboard() -> str:
    """The generated part of records/README.md, markers included."""
    found = tracks.read()
    quotes = json.loads(QUOTED.read_text(encoding="utf-8"))
    records = in_order()
    on = {record["name"]: tracks.tracks_of(record, found) for record in records}
    blocks = []
    for name, track in found["tracks"].items():
        mine = [record for record in records if name in on[record["name"]]]
        if not mine:
            continue
        lines = [entry_line(record, standing) for record, standing in rank(mine, track)]
        lines += [quote_line(quote) for quote in quotes["rows"] if quote["track"] == name]
        blocks.append(f"### {name}\n\n{about(track, found)}\n\n{rec.table(titles(), lines, 2)}")
    if rest := [record for record in records if not on[record["name"]]]:
        lines = [entry_line(record, "no track") for record in rest]
        blocks.append(f"### Entries without a track\n\n{rec.table(titles(), lines, 2)}")
    blocks.append(open_tracks(found, on))
    return "\n\n".join([BEGIN, *blocks, other_projects(quotes), END])


def about(track: dict, found: dict) -> str:
    """A track in two sentences."""
    hardware = (
        f"{track['class']}, {track['hardware']['num_devices']} x {track['hardware']['device']}"
    )
    fingerprint = found["datasets"][track["dataset"]]["fingerprint"]
    data = f"Dataset {track['dataset']}, fingerprint {fingerprint[:12]}"
    return f"{tracks.rule_text(track)} {data}; `train_{track['script']}.py` on {hardware}."


def open_tracks(found: dict, on: dict[str, list[str]]) -> str:
    """The tracks that nobody has run, each with its command."""
    taken = {name for names in on.values() for name in names}
    lines = []
    for name, track in found["tracks"].items():
        board = board_of(name)
        if name not in taken and track["ranked_by"] == "val_bpb":
            made_by = found["datasets"][track["dataset"]]["made_by"]
            names = f"{board}-bpb, {board}-seconds"
            lines.append([names, f"`{made_by}`", f"`{track['train']}`"])
    if not lines:
        return "Every track has an entry."
    table = rec.table(["tracks", "makes the dataset", "trains"], lines, 3)
    return f"### Tracks without an entry\n\nUnmeasured: their limits are open until three seeds have run.\n\n{table}"


def board_of(track_name: str) -> str:
    """What the two tracks of a script and card on a dataset have in common."""
    return track_name.rsplit("-", 1)[0]


def other_projects(quotes: dict) -> str:
    lines = []
    for quote in quotes["speeds"]:
        hardware = f"{quote['num_devices']} x {quote['device']}"
        more = [quote.get(key, "") for key in ("mfu", "memory", "start")]
        lines.append([quote["what"], hardware, quote["speed"], *more])
    head = [
        "training speed, quoted",
        "hardware",
        "tokens/s",
        "MFU",
        "peak memory",
        "start to first step",
    ]
    return f"### Other projects\n\n{quotes['source']}\n\n{rec.table(head, lines, len(head))}"


def write() -> None:
    """Updates README.md and the pictures, if every record verifies."""
    for folder in sorted(p for p in rec.BASELINES.iterdir() if p.is_dir()):
        if folder.name.startswith("."):
            continue
        if problems := check.problems(folder):
            rec.fail(
                f"{folder.name} does not verify ({problems[0]}), so the leaderboard stays as it was"
            )
    text = README.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        rec.fail(f"{README} has lost the markers of the leaderboard; restore them")
    new = text[: text.index(BEGIN)] + leaderboard() + text[text.index(END) + len(END) :]
    temporary = README.with_name(f".{README.name}.{os.getpid()}.tmp")
    temporary.write_text(new, encoding="utf-8")
    os.replace(temporary, README)
    state = "was current" if new == text else "is written"
    print(f"{os.path.relpath(README)}: the leaderboard {state}")
    for path in pictures():
        print(f"{os.path.relpath(path)}: the tracks of one dataset")


# ---- pictures


def pictures() -> list[Path]:
    """One picture for each dataset with entries. README.md shows curves.png, that of tracks.json's `picture`."""
    found = tracks.read()
    records = in_order()
    paths = []
    for name in found["datasets"]:
        panels = {}
        for record in records:
            for track in tracks.tracks_of(record, found):
                if found["tracks"][track]["dataset"] == name:
                    board = board_of(track)
                    panels.setdefault(board, {})[record["name"]] = record
        if panels:
            file = "curves.png" if name == found["picture"] else f"curves_{name}.png"
            paths.append(README.with_name(file))
            boards = {board: list(members.values()) for board, members in panels.items()}
            draw(boards, found, paths[-1])
    return paths


def draw(boards: dict[str, list[dict]], found: dict, path: Path) -> None:
    """A row for each script and card of a dataset: against tokens, against seconds, and what is ranked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (15, 4.3 * len(boards) + 0.5)
    figure, rows = plt.subplots(len(boards), 3, figsize=size, squeeze=False, layout="constrained")
    quotes = json.loads(QUOTED.read_text(encoding="utf-8"))["rows"]
    for panels, (board, records) in zip(rows, boards.items(), strict=True):
        bpb = found["tracks"][f"{board}-bpb"]
        seconds = found["tracks"][f"{board}-seconds"]
        mine = [quote for quote in quotes if quote["track"] == f"{board}-bpb"]
        draw_board(panels, records, bpb, seconds, mine)
        hardware = f"{bpb['hardware']['num_devices']} x {bpb['hardware']['device']}"
        panels[0].set_title(f"{board}, {hardware}", loc="left")
    figure.supxlabel(NOTE, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_board(panels, records: list[dict], bpb: dict, seconds: dict, quotes: list[dict]) -> None:
    """Args: panels three axes; bpb and seconds the two tracks; quotes runs without logs"""
    from matplotlib.ticker import EngFormatter

    best = min(record["summary"]["val_bpb"]["mean"] for record in records)
    drawn = [r for r in records if r["summary"]["val_bpb"]["mean"] <= FAR * best]
    heights = []
    for number, record in enumerate(drawn):
        heights += draw_record(panels, record, number)
    for quote in quotes:
        label = f"{quote['what'].split(',')[0]}, quoted"
        for axes, x in ((panels[0], bpb["tokens"]), (panels[1], quote["train_seconds"])):
            axes.plot(x, quote["val_bpb"], "x", color="0.25", ms=8, label=label)
        heights.append(quote["val_bpb"])

    # The limits of both tracks, and an area around what is ranked.
    panels[2].margins(0.15)
    grey = {"color": "0.4", "ls": "--", "lw": 0.9}
    small = {"color": "0.3", "fontsize": 8, "xytext": (4, 3), "textcoords": "offset points"}
    if target := seconds["target_bpb"]:
        panels[2].axhline(target, **grey)
        words = f"target of the track by seconds: {target}"
        panels[2].annotate(words, (0, target), xycoords=("axes fraction", "data"), **small)
    if limit := bpb["max_seconds"]:
        panels[2].axvline(limit, **grey)
        words = f"limit with fixed tokens: {limit} s"
        where = {"xycoords": ("data", "axes fraction"), "rotation": 90, "ha": "right"}
        panels[2].annotate(words, (limit, 0), **{**small, "xytext": (-3, 4), **where})
    margin = 0.05 * (max(heights) - min(heights))
    for axes in panels[:2]:
        axes.set_ylim(min(heights) - margin, max(heights) + margin)
    panels[0].xaxis.set_major_formatter(EngFormatter())
    panels[0].set_ylabel("bits per byte")
    names = ("training tokens", "training seconds", "training seconds of the whole run")
    for axes, name in zip(panels, names, strict=True):
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    panels[2].set_ylabel("val bpb")
    panels[2].set_title("what is ranked: one dot a seed", loc="left", fontsize=10)
    left_out = len(records) - len(drawn)
    words = f"{left_out} more, {FAR - 1:.0%} or more above the best" if left_out else None
    panels[1].legend(frameon=False, fontsize=8, loc="upper right", title=words)


def draw_record(panels, record: dict, number: int) -> list[float]:
    """Lines and dots of one record; returns the heights that the axes must show."""
    import matplotlib.pyplot as plt

    colour = plt.get_cmap("tab10").colors[number % 10]
    marker = MARKERS[number % len(MARKERS)]
    style = STYLES[number % len(STYLES)]
    folder = rec.BASELINES / record["name"]
    curve = rec.loss_curve([rec.read_log(folder / run["log"]) for run in record["runs"]])
    mean = record["summary"]["val_bpb"]["mean"]
    label = f"{record['name']}: {mean:.4f}"
    runs = record["runs"]
    dots = {"color": colour, "marker": marker, "ls": "", "ms": 6, "mec": "white", "mew": 0.5}
    for axes, key in ((panels[0], "tokens"), (panels[1], "train_seconds")):
        x = [row[key] for row in curve]
        axes.plot(x, [row["bpb"] for row in curve], color=colour, ls=style, lw=1.2)
        axes.plot([], [], label=label, **{**dots, "ls": style})
        for run in runs:
            axes.plot(run[key], run["val_bpb"], **dots)
    for run in runs:
        panels[2].plot(run["train_seconds"], run["val_bpb"], **dots)
    # The first sixth of a run is far above the rest, which is what one wants to see.
    late = [row["bpb"] for row in curve if row["tokens"] >= curve[-1]["tokens"] / 6]
    return late + [run["val_bpb"] for run in runs]
