"""The standing of entries on a track. README.md beside it has the rules in words."""

from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean

import entry
import flags
import tracks
from entry import values
from significance import ALPHA, welch
from text import OTHER_SESSION, p_text

WORSE_ALPHA = 0.05  # a p that suffices to call an entry worse than the record
# Gain in seconds that counts without a rerun of the record in the same session: GPUs differ by 3 %,
# days by 2 %.
SESSION_NOISE = 0.05


class Kind(Enum):
    RECORD = "record"
    EQUAL = "not significant"
    WORSE = "worse"
    INELIGIBLE = "ineligible"


@dataclass(frozen=True)
class Standing:
    """Where an entry stands: among records by its number, else against the record of its day.

    p is that of Welch's test against that record, where it decides; elsewhere `reason` says what
    does.
    """

    kind: Kind
    number: int | None = None
    p: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        """E.g. "record 2, p < 0.0001", "not significant, p = 0.16", "ineligible: too slow"."""
        title = self.kind.value + (f" {self.number}" if self.number else "")
        if self.reason:
            separator = ", " if self.kind in (Kind.RECORD, Kind.WORSE) else ": "
            return title + separator + self.reason
        if self.number == 1:
            return title
        return f"{title}, p {p_text(self.p)}"


def rank(records: list[dict], track: dict) -> list[tuple[dict, Standing]]:
    """Each record of a track with its standing: from the best down, then those that are ineligible.

    Args: records in any order, with their names; track one of tracks.json
    """
    metric = track["ranked_by"]
    earlier = []
    best = None
    count = 0
    ineligible = []
    ranked = []
    for record in in_order(records, metric):
        if reason := tracks.ineligible_because(record, track):
            ineligible.append((record, Standing(Kind.INELIGIBLE, reason=reason)))
            continue
        standing = Standing(Kind.RECORD) if best is None else compare(record, best, earlier, metric)
        if standing.kind is Kind.RECORD:
            best = record
            count += 1
            standing = replace(standing, number=count)
        earlier.append(record)
        ranked.append((record, standing))

    def mean(pair: tuple[dict, Standing]) -> float:
        return fmean(values(pair[0], metric))

    return sorted(ranked, key=mean) + sorted(ineligible, key=mean)


def in_order(records: list[dict], metric: str) -> list[dict]:
    """Records by day, those of one day from the best down, each behind its baseline."""
    named = {record["name"]: record for record in records}

    def depth(record: dict) -> int:
        """How many baselines of its own day stand before a record."""
        baseline = named.get(record["against"])
        same_day = baseline is not None and entry.day_of(baseline) == entry.day_of(record)
        return 1 + depth(baseline) if same_day else 0

    def order(record: dict) -> tuple[str, int, float]:
        return entry.day_of(record), depth(record), fmean(values(record, metric))

    return sorted(records, key=order)


def same_recipe(record: dict, other: dict) -> bool:
    """Whether one is a rerun of the other: script, args file and flags are equal."""
    parts = []
    for each in (record, other):
        hashes = each["files"][each["script"]], each["files"].get(each["args"])
        parts.append((*hashes, flags.recipe_flags(each["flags"])))
    return parts[0] == parts[1]


def compare(record: dict, best: dict, earlier: list[dict], metric: str) -> Standing:
    """The standing beside the best record before it, without a number; a rerun is never a record."""
    if metric == "val_bpb":
        standing = by_test([welch(values(record, metric), values(best, metric))])
    else:
        standing = compare_seconds(record, best, earlier)
    if standing.kind is Kind.RECORD and any(same_recipe(record, other) for other in earlier):
        return Standing(Kind.EQUAL, reason="a rerun")
    return standing


def by_test(tests: list[dict]) -> Standing:
    """A record has p < ALPHA and a lower mean in all tests, a worse entry a higher mean."""
    undefined = any(test["p"] is None for test in tests)
    p = None if undefined else max(test["p"] for test in tests)
    if p is not None and p < ALPHA and all(test["difference"] < 0 for test in tests):
        return Standing(Kind.RECORD, p=p)
    if p is not None and p < WORSE_ALPHA and all(test["difference"] > 0 for test in tests):
        return Standing(Kind.WORSE, p=p)
    return Standing(Kind.EQUAL, p=p)


def compare_seconds(record: dict, best: dict, earlier: list[dict]) -> Standing:
    """By a test if it names the best one, or its rerun, of the same session; else by the ratio.

    A new record is faster than both, the best one and its rerun.
    """
    metric = "train_seconds"
    test = welch(values(record, metric), values(best, metric))
    for baseline in earlier:
        is_best = baseline is best or same_recipe(baseline, best)
        is_named = baseline["name"] == record["against"]
        if is_best and is_named and entry.same_session(record, baseline):
            return by_test([test, welch(values(record, metric), values(baseline, metric))])
    ratio = fmean(values(record, metric)) / fmean(values(best, metric))
    if abs(ratio - 1) < SESSION_NOISE:
        return Standing(Kind.EQUAL, reason=OTHER_SESSION)
    standing = by_test([test])
    if standing.kind is Kind.EQUAL:
        return standing
    return Standing(standing.kind, reason=f"{abs(ratio - 1):.1%} {'faster' if ratio < 1 else 'slower'}")
