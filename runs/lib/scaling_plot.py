"""Runs of several sizes as one table and one figure, with fitted exponents.

    python runs/lib/scaling_plot.py out/miniseries

It reads all finished runs below that folder and writes results.csv and scaling.png there.

Weights are those that are multiplied for every token (matrices and head, no embeddings), FLOPs are 6 x weights x
tokens. Runs whose FLOPs differ by at most 5 % form a budget if there are at least three sizes among them. Its best size
is the minimum of a parabola of bits per byte over log(weights), fitted to the best one and at most two on each side.
Best sizes and tokens are fitted by powers of FLOPs, the lowest bits per byte of each budget, or those of all runs
without one, by floor + factor x FLOPs ** -exponent (with fewer than four points by a power). CORE is that of
runs/score_core.py. The last line is the result as JSON.
"""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure
from scipy.optimize import curve_fit
from scipy.stats import linregress

BLUE = "#2f6f9f"
RED = "#c0392b"


def read_run(run_dir: Path) -> dict:
    """A row of the table, from what a finished run wrote; core is None if it has not been scored."""
    description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    config = description["config"]
    layers = config["num_layers"]
    width = config["width"]
    vocab_size = math.ceil(config["vocab_size"] / 64) * 64  # as the model pads it
    weights = layers * (4 * width + 2 * config["mlp_width"]) * width + vocab_size * width
    return {
        "run": run_dir.name,
        "num_layers": layers,
        "width": width,
        "weights": weights,
        "tokens": result["tokens"],
        "tokens_per_weight": result["tokens"] / weights,
        "flops": 6.0 * weights * result["tokens"],
        "val_bpb": result["val_bpb"],
        "core": result.get("core"),
        "train_seconds": result["train_seconds"],
        "devices": description["machine"]["num_devices"],
    }


def budgets(runs: pandas.DataFrame) -> list[pandas.DataFrame]:
    """Groups of runs, sorted by FLOPs, of at least three sizes whose FLOPs differ by at most 5 %."""
    groups = []
    while len(runs):
        is_near = runs.flops <= 1.05 * runs.flops.iloc[0]
        groups.append(runs[is_near])
        runs = runs[~is_near]
    return [group for group in groups if group.weights.nunique() >= 3]


def optimum(group: pandas.DataFrame) -> dict:
    """Best size of a budget, and its parabola; no weights and tokens without a minimum between the sizes."""
    flops = float(np.exp(np.log(group.flops).mean()))
    sizes = group.groupby("weights").val_bpb.mean()  # over seeds
    # Far from the best size, bits per byte rise faster than a parabola on one side.
    middle = int(sizes.argmin())
    near = sizes.iloc[max(middle - 2, 0) : middle + 3]
    curve = np.polyfit(np.log(near.index), near, 2)
    ends = [int(near.index[0]), int(near.index[-1])]
    best_size = {"flops": flops, "curve": curve.tolist(), "ends": ends, "val_bpb": float(sizes.min())}
    best_size |= {"weights": None, "tokens": None}
    best = math.exp(-curve[1] / (2 * curve[0])) if curve[0] > 0 else 0.0  # else it opens downward
    # With the best size at an end, a minimum of the parabola says nothing.
    if ends[0] < best < ends[1] and 0 < middle < len(sizes) - 1:
        lowest = float(np.polyval(curve, math.log(best)))
        best_size |= {"weights": best, "tokens": flops / 6 / best, "val_bpb": lowest}
    return best_size


def power(x: pandas.Series, y: pandas.Series) -> dict | None:
    """y = factor x ** exponent by least squares of logarithms; the error is one standard error, None for two points."""
    if len(x) < 2:
        return None
    fit = linregress(np.log(x), np.log(y))
    error = float(fit.stderr) if len(x) > 2 else None
    return {"exponent": float(fit.slope), "error": error, "factor": math.exp(fit.intercept)}


def floor_and_power(x: pandas.Series, y: pandas.Series) -> dict | None:
    """y = floor + factor x ** -exponent; without a floor if there are fewer than four points or no fit is found."""
    plain = power(x, y)
    if plain:
        plain |= {"exponent": -plain["exponent"], "floor": 0.0}
    if len(x) < 4:
        return plain
    scale = x.iloc[0]  # keeps the numbers of the search near 1

    def curve(x, floor, size, exponent):
        return floor + size * (x / scale) ** -exponent

    start = (0.5 * y.min(), 0.5 * y.iloc[0], 0.2)
    upper = (y.min(), 10 * y.iloc[0], 3.0)
    try:
        parameters, covariance = curve_fit(curve, x, y, start, bounds=(0, upper))
    except RuntimeError:
        return plain
    floor, size, exponent = parameters.tolist()
    error = float(np.sqrt(covariance[2, 2]))
    return {"floor": floor, "exponent": exponent, "factor": size * scale**exponent, "error": error}


def best_sizes(result: dict) -> pandas.DataFrame:
    """The budgets that have a minimum between their sizes."""
    columns = ["flops", "weights", "tokens", "val_bpb"]
    return pandas.DataFrame(result["budgets"], columns=columns).dropna().astype(float)


def analyse(runs: pandas.DataFrame) -> dict:
    """Best sizes of all budgets, and the fits over them, from runs sorted by FLOPs."""
    result = {"runs": len(runs), "budgets": [optimum(group) for group in budgets(runs)]}
    inside = best_sizes(result)
    for name in ("weights", "tokens"):
        result[name] = power(inside.flops, inside[name])
    points = pandas.DataFrame(result["budgets"] or runs)
    return result | {"bpb": floor_and_power(points.flops, points.val_bpb)}


def describe(fit: dict | None, name: str) -> str:
    """A fit as a formula."""
    if fit is None:
        return f"{name}: too few points"
    exponent = f"{fit['exponent']:.3f}"
    if fit["error"] is not None:
        exponent += f" +- {fit['error']:.3f}"
    if "floor" not in fit:
        return f"{name} ~ FLOPs ^ {exponent}"
    return f"{name} = {fit['floor']:.3f} + {fit['factor']:.3g} FLOPs ^ -({exponent})"


def plot_fit(axis, points: pandas.DataFrame, name: str, fit: dict | None, label: str, color: str) -> None:
    """A column of points over FLOPs, and its fit."""
    axis.plot(points.flops, points[name], "o", color=color, label=describe(fit, label))
    if fit:
        fine = np.geomspace(points.flops.min(), points.flops.max(), 100)
        exponent = -fit["exponent"] if "floor" in fit else fit["exponent"]
        axis.plot(fine, fit.get("floor", 0.0) + fit["factor"] * fine**exponent, color=color, lw=1)


def plot_sizes(axis, runs: pandas.DataFrame, result: dict) -> None:
    """Bits per byte over weights: the runs of each budget, its parabola, and a star at its minimum."""
    for group, best_size in zip(budgets(runs), result["budgets"], strict=True):
        (dots,) = axis.plot(group.weights, group.val_bpb, "o", label=f"{best_size['flops']:.1e} FLOPs")
        color = dots.get_color()
        fine = np.geomspace(*best_size["ends"], 50)
        axis.plot(fine, np.polyval(best_size["curve"], np.log(fine)), color=color, lw=1)
        if best_size["weights"]:
            axis.plot(best_size["weights"], best_size["val_bpb"], "*", ms=14, color=color)
    axis.set(xscale="log", xlabel="weights", ylabel="bits per byte", title="sizes for one budget")


def plot(runs: pandas.DataFrame, result: dict, path: Path) -> None:
    """Bits per byte over FLOPs, of each budget or else of each run; two more panels if there are budgets."""
    panels = 3 if result["budgets"] else 1
    figure = Figure(figsize=(3 + 4 * panels, 4.5), layout="constrained")
    axes = figure.subplots(ncols=panels, squeeze=False)[0]
    points = pandas.DataFrame(result["budgets"] or runs)
    plot_fit(axes[0], points, "val_bpb", result["bpb"], "bpb", BLUE)
    axes[0].set(xscale="log", xlabel="FLOPs (6 x weights x tokens)", ylabel="bits per byte")
    if result["budgets"]:
        plot_sizes(axes[1], runs, result)
        inside = best_sizes(result)
        plot_fit(axes[2], inside, "weights", result["weights"], "weights", RED)
        plot_fit(axes[2], inside, "tokens", result["tokens"], "tokens", BLUE)
        axes[2].set(xlabel="FLOPs", title="best weights and tokens")
        if len(inside):  # an empty axis cannot be logarithmic
            axes[2].set(xscale="log", yscale="log")
    else:
        for run in runs.itertuples():
            axes[0].annotate(f"{run.num_layers} layers", (run.flops, run.val_bpb), fontsize=8)
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder with run directories")
    folder = parser.parse_args().folder
    finished = sorted(path.parent for path in folder.glob("*/result.json"))
    if not finished:
        sys.exit(f"error: {folder} holds no finished run; train some with runs/scaling.sh")
    runs = pandas.DataFrame(map(read_run, finished)).astype({"core": float})
    runs = runs.sort_values(["flops", "weights"], ignore_index=True)
    result = analyse(runs)

    runs.to_csv(folder / "results.csv", index=False, lineterminator="\n")
    plot(runs, result, folder / "scaling.png")

    forms = {"weights": "{:,}", "tokens": "{:,.0f}", "flops": "{:.2e}", "train_seconds": "{:.1f}"}
    columns = ["run", "num_layers", "width", "weights", "tokens", "flops", "val_bpb", "core", "train_seconds"]
    formatters = {name: form.format for name, form in forms.items()}
    print(runs.to_string(columns=columns, formatters=formatters, float_format="{:.4f}".format, index=False, na_rep=""))
    for best_size in result["budgets"]:
        size = "no minimum between the smallest and the largest size; train others"
        if best_size["weights"]:
            size = f"{best_size['weights']:,.0f} weights, {best_size['tokens']:,.0f} tokens"
        print(f"{best_size['flops']:.2e} FLOPs: {size}")
    for name in ("weights", "tokens", "bpb") if result["budgets"] else ("bpb",):
        print(describe(result[name], name))
    print(f"{folder / 'results.csv'}, {folder / 'scaling.png'}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
