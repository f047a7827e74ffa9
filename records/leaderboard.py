"""The leaderboard of records/README.md, CURVES.md and the pictures, from baselines/ (compare.py --write)."""

import os
from pathlib import Path
from statistics import fmean

import entry
import pictures
import rules
import tracks

README = entry.ROOT / "records" / "README.md"
QUOTED = entry.ROOT / "records" / "quoted.json"
BEGIN = "<!-- written by records/compare.py --write; do not edit -->"
END = "<!-- /written -->"
SHOWN = ("val_bpb", "train_seconds", "tokens", "tokens_per_second", "mfu", "peak_memory_gib")
TITLES = ["entry", "standing", "seeds", "val bpb", "sd", *(entry.METRICS[key][0] for key in SHOWN[1:])]
SHARES = (0.1, 0.25, 0.5, 1.0)
SMALL_GAIN = 0.05  # of the seconds: less counts only beside a rerun of the record before, rule 6


# ==== standings


def in_order() -> list[dict]:
    """All entries by day; on the same day, each after the one it is compared with, else the best first."""
    records = {}
    for folder in entry.folders():
        records[folder.name] = {**entry.read_record(folder), "name": folder.name}

    def depth(name: str | None) -> int:
        return 1 + depth(records[name]["against"]) if name in records else 0

    return sorted(records.values(), key=lambda r: (day(r), depth(r["against"]), fmean(values(r, "val_bpb"))))


def day(record: dict) -> str:
    return record.get("date", record["name"][:10])


def same_recipe(record: dict, other: dict) -> bool:
    """Whether one is a rerun of the other: script, args file and flags are equal."""
    parts = []
    for r in (record, other):
        hashes = r["files"][r["script"]], r["files"].get(r["args"])
        parts.append((*hashes, entry.recipe_flags(r["flags"])))
    return parts[0] == parts[1]


def values(record: dict, key: str) -> list[float]:
    return [run[key] for run in record["runs"]]


def is_better(test: dict) -> bool:
    return test["difference"] < 0 and test["p"] is not None and test["p"] < tracks.P


def beside_rerun(record: dict, best: dict, records: list[dict]) -> bool:
    """Rule 6: whether a new recipe names a run of the best one on its own day, and is faster than that too."""
    named = [r for r in records if r["name"] == record["against"]]
    if same_recipe(record, best) or not named or not same_recipe(named[0], best):
        return False
    pair = [values(r, "train_seconds") for r in (record, named[0])]
    return day(named[0]) == day(record) and is_better(entry.welch(*pair))


def rank(records: list[dict], track: dict) -> list[tuple[dict, str]]:
    """(record, its standing) on a track, best first, from its records in the order of time."""
    key = track["ranked_by"]
    best = None
    count = 0
    ranked = []
    unranked = []
    for record in records:
        if why := tracks.refusal(record, track):
            unranked.append((record, why))
            continue
        if best is None:
            standing = "record 1"
        else:
            test = entry.welch(values(record, key), values(best, key))
            gain = -test["difference"] / fmean(values(best, key))
            small = key == "train_seconds" and gain < SMALL_GAIN
            if not is_better(test):
                standing = f"no record, p {entry.p_text(test['p'])}"
            elif small and not beside_rerun(record, best, records):
                why = "a rerun" if same_recipe(record, best) else f"{gain:.1%} without a rerun"
                standing = f"no record, {why}"
            else:
                standing = f"record {count + 1}, p {entry.p_text(test['p'])}"
        if standing.startswith("record"):
            best = record
            count += 1
        ranked.append((record, standing))

    def mean(pair: tuple[dict, str]) -> float:
        return fmean(values(pair[0], key))

    return sorted(ranked, key=mean) + sorted(unranked, key=mean)


# ==== text


def entry_line(record: dict, standing: str) -> list[str]:
    mean = {key: record["summary"][key]["mean"] for key in SHOWN}
    sd = record["summary"]["val_bpb"]["sd"]
    bpb, *metrics = (format(mean[key], entry.METRICS[key][1]) for key in SHOWN)
    link = f"[{record['name']}](../baselines/{record['name']}/README.md)"
    return [link, standing, str(len(record["runs"])), bpb, entry.cell(sd, ".5f"), *metrics]


def quote_line(quote: dict) -> list[str]:
    metrics = [entry.cell(quote.get(key), entry.METRICS[key][1]) for key in SHOWN[1:]]
    return [quote["what"], "quoted", "", entry.cell(quote.get("val_bpb"), ".4f"), "", *metrics]


def leaderboard() -> str:
    """The generated part of records/README.md, markers included."""
    found = tracks.read()
    quotes = entry.read_json(QUOTED)
    records = in_order()
    on = {record["name"]: tracks.tracks_of(record, found) for record in records}
    blocks = []
    # What everyone can repeat comes first.
    for name, track in sorted(found["tracks"].items(), key=lambda pair: pair[1]["dataset"] != found["picture"]):
        mine = [record for record in records if name in on[record["name"]]]
        if not mine:
            continue
        lines = [entry_line(record, standing) for record, standing in rank(mine, track)]
        lines += [quote_line(quote) for quote in quotes["rows"] if quote["track"] == name]
        blocks.append(f"### {name}\n\n{about(track, found)}\n\n{entry.table(TITLES, lines, 2)}")
    if rest := [record for record in records if not on[record["name"]]]:
        lines = [entry_line(record, "no track") for record in rest]
        blocks.append(f"### Entries without a track\n\n{entry.table(TITLES, lines, 2)}")
    blocks.append(open_tracks(found, on))
    return "\n\n".join([BEGIN, *blocks, other_projects(quotes), END])


def about(track: dict, found: dict) -> str:
    card = f"{track['class']}, {track['hardware']['num_devices']} x {track['hardware']['device']}"
    data = f"Dataset {track['dataset']}, fingerprint {found['datasets'][track['dataset']]['fingerprint'][:12]}"
    return f"{tracks.rule_text(track)} {data}; `train_{track['script']}.py` on {card}."


def open_tracks(found: dict, on: dict[str, list[str]]) -> str:
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
    table = entry.table(["tracks", "makes the dataset", "trains"], lines, 3)
    return f"### Tracks without an entry\n\nTheir limits are open until three seeds have run.\n\n{table}"


def board_of(track_name: str) -> str:
    """What the two tracks of a script and card on a dataset have in common."""
    return track_name.rsplit("-", 1)[0]


def other_projects(quotes: dict) -> str:
    lines = []
    for quote in quotes["speeds"]:
        hardware = f"{quote['num_devices']} x {quote['device']}"
        more = [quote.get(key, "") for key in ("mfu", "memory", "start")]
        lines.append([quote["what"], hardware, quote["speed"], *more])
    head = ["training speed, quoted", "hardware", "tokens/s", "MFU", "peak memory", "start to first step"]
    return f"### Other projects\n\n{quotes['source']}\n\n{entry.table(head, lines, len(head))}"


def write() -> None:
    for folder in entry.folders():
        if problems := rules.problems(folder):
            raise entry.UserError(f"{folder.name} does not verify ({problems[0]}), so the leaderboard stays as it was")
    for page, part in ((README, leaderboard()), (README.with_name("CURVES.md"), curves())):
        text = page.read_text(encoding="utf-8")
        new = text[: text.index(BEGIN)] + part + text[text.index(END) + len(END) :]
        entry.write_whole(page, new)
        print(f"{os.path.relpath(page)}: {'was current' if new == text else 'is written'}")
    for path in draw():
        print(f"{os.path.relpath(path)}: written")


# ==== today's entries


def todays() -> dict[str, dict]:
    """The newest entry of each args file whose flags are those of today; what everyone can repeat comes first."""
    current = {}
    for record in in_order():
        if args := record["args"]:
            paths = entry.BASELINES / record["name"] / args, entry.ROOT / "runs" / args
            then, now = (entry.args_words(path.read_text(encoding="utf-8")) for path in paths)
            current |= {args: record} if then == now else {}
    first = tracks.read()["picture"]
    return dict(sorted(current.items(), key=lambda pair: pair[1]["dataset"]["name"] != first))


def rows_of(dataset: str) -> list[pictures.Row]:
    """A row for each of them on a dataset, called by what its args file adds to the dataset's name."""
    rows = []
    for args, record in todays().items():
        if record["dataset"]["name"] == dataset:
            rows.append(pictures.record_row(entry.BASELINES / record["name"]))
            rows[-1].name = args.removesuffix(".args").partition("_")[2] or "small"
    return rows


def curves() -> str:
    """The generated part of CURVES.md, markers included: training loss of today's entries at shares of the run."""
    blocks = [BEGIN]
    for args, record in todays().items():
        curve = entry.loss_curve(entry.read_logs(entry.BASELINES / record["name"], record))
        lines = []
        for share in SHARES:
            row = min(curve, key=lambda row: abs(row["tokens"] - share * curve[-1]["tokens"]))
            loss = f"{row['loss']:.3f}", entry.cell(row["loss_sd"], ".3f"), f"{row['bpb']:.3f}"
            lines.append([f"{share:.0%}", str(row["step"]), f"{row['tokens'] / 1e6:.1f} M", *loss])
        table = entry.table(["of the run", "step", "tokens", "loss", "sd", "bpb"], lines, 1)
        bpb, seconds, _, speed, _, memory = (record["summary"][key]["mean"] for key in SHOWN)
        about = f"{len(record['runs'])} seeds on {record['hardware']['num_devices']} x {record['hardware']['device']}: "
        about += f"{bpb:.4f} val bpb in {seconds:.1f} s, {speed:,.0f} tokens/s, {memory:.1f} GiB"
        link = f"[{record['name']}](../baselines/{record['name']}/README.md)"
        blocks.append(f"## @runs/{args}\n\n{link}, {about}.\n\n{table}")
    return "\n\n".join([*blocks, END])


def draw() -> list[Path]:
    """Today's entries on the dataset that everyone can make; those of B34 beside other projects; training losses."""
    picture, quotes = tracks.read()["picture"], entry.read_json(QUOTED)
    paths = [README.with_name(name) for name in ("curves.png", "head_to_head.png", "training.png")]
    b34 = {"B34: 34 M tokens of prose": (rows_of("b34"), quotes["rows"])}
    pictures.draw_today({f"{picture.upper()}: 34 M tokens of Python": (rows_of(picture), [])}, paths[0])
    pictures.draw_today(b34 | {"94 M tokens of prose": ([], quotes["head_to_head"])}, paths[1])
    pictures.draw_rows(rows_of(picture), paths[2])
    return paths
