"""Runs of several sizes as one table and one picture, with fitted exponents.

    python runs/scaling_plot.py out/miniseries              all finished runs below that folder
    python runs/scaling_plot.py out/laws --out out/laws     writes results.csv and scaling.png there (the default)

Weights are those that are multiplied for every token (matrices and head, no embeddings), FLOPs are 6 x weights x
tokens. Runs that cost the same (to 5 %) and differ in size give the best size for that budget: the minimum of a
parabola of bits per byte over log(weights). Over several budgets, best sizes and token counts are fitted by powers of
FLOPs. The lowest bits per byte of each budget, or of all runs, are fitted by floor + b x FLOPs ** -c, with fewer than
four by a power alone. The last line is the result as JSON.
"""

import argparse
import csv
import json
import math
import sys
from pathlib import Path

import numpy as np
from scipy.optimize import OptimizeWarning, curve_fit
from scipy.stats import linregress

COLUMNS = ("run", "num_layers", "width", "weights", "tokens", "tokens_per_weight", "flops", "val_bpb", "core",
           "train_seconds", "devices")  # fmt: skip


def read_run(run_dir: Path) -> dict:
    """A row of the table, from what the run wrote."""
    try:
        description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        lines = (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
        c, last = description["config"], [e for e in map(json.loads, lines) if "val_bpb" in e][-1]
        D, V = c["width"], -(-c["vocab_size"] // 64) * 64
        weights = c["num_layers"] * (4 * D + 2 * c["mlp_width"]) * D + V * D
    except (OSError, ValueError, KeyError, IndexError) as error:
        sys.exit(
            f"error: {run_dir} cannot be read as a finished run ({error!r}); remove it or let it finish"
        )
    core = None
    if (run_dir / "core.csv").is_file():
        with (run_dir / "core.csv").open(encoding="utf-8", newline="") as file:
            core = next(float(row[3]) for row in csv.reader(file) if row[0] == "CORE")
    return {
        "run": run_dir.name, "num_layers": c["num_layers"], "width": D, "weights": weights, "tokens": last["tokens"],
        "tokens_per_weight": last["tokens"] / weights, "flops": 6.0 * weights * last["tokens"],
        "val_bpb": last["val_bpb"], "core": core, "train_seconds": last["train_seconds"],
        "devices": description["machine"]["num_devices"],
    }  # fmt: skip


def budgets(rows: list[dict]) -> list[list[dict]]:
    """Rows of at least three sizes that cost the same to 5 %."""
    groups = []
    for row in sorted(rows, key=lambda row: row["flops"]):
        if groups and row["flops"] <= 1.05 * groups[-1][0]["flops"]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [group for group in groups if len({row["weights"] for row in group}) >= 3]


def optimum(group: list[dict]) -> dict:
    """Best size of a budget; weights and tokens are None if no minimum lies between the smallest and the largest."""
    x, y = (np.array([row[key] for row in group]) for key in ("weights", "val_bpb"))
    flops = float(np.exp(np.mean(np.log([row["flops"] for row in group]))))
    curve = np.polyfit(np.log(x), y, 2)
    found = {
        "flops": flops,
        "curve": curve,
        "weights": None,
        "tokens": None,
        "val_bpb": float(y.min()),
    }
    if curve[0] > 0 and x.min() < (best := math.exp(-curve[1] / (2 * curve[0]))) < x.max():
        found |= {
            "weights": best,
            "tokens": flops / 6 / best,
            "val_bpb": float(np.polyval(curve, math.log(best))),
        }
    return found


def power(x: list[float], y: list[float]) -> dict | None:
    """y = factor x ** exponent by least squares of logarithms; the error is one standard error, None for two points."""
    if len(x) < 2:
        return None
    fit = linregress(np.log(x), np.log(y))
    return {"exponent": float(fit.slope), "error": float(fit.stderr) if len(x) > 2 else None,
            "factor": math.exp(fit.intercept)}  # fmt: skip


def floor_and_power(x: list[float], y: list[float]) -> dict | None:
    """y = floor + factor x ** -exponent; without a floor if there are fewer than four points or no fit is found."""
    plain = power(x, y)
    if len(x) < 4:
        return plain and {**plain, "exponent": -plain["exponent"], "floor": 0.0}
    scale = x[0]  # keeps the numbers of the search near 1

    def curve(x, floor, size, exponent):
        return floor + size * (x / scale) ** -exponent

    try:
        start, most = (0.5 * min(y), 0.5 * y[0], 0.2), (min(y), 10 * y[0], 3.0)
        (floor, size, exponent), covariance = curve_fit(
            curve, np.array(x), y, start, bounds=(0, most)
        )
    except (RuntimeError, OptimizeWarning):
        return {**plain, "exponent": -plain["exponent"], "floor": 0.0}
    return {"floor": float(floor), "exponent": float(exponent), "factor": float(size * scale**exponent),
            "error": float(np.sqrt(covariance[2, 2]))}  # fmt: skip


def analyse(rows: list[dict]) -> dict:
    best = [optimum(group) for group in budgets(rows)]
    inside = [b for b in best if b["weights"]]
    points = best or sorted(rows, key=lambda row: row["flops"])
    flops = [b["flops"] for b in inside]
    return {
        "runs": len(rows), "budgets": best,
        "weights": power(flops, [b["weights"] for b in inside]), "tokens": power(flops, [b["tokens"] for b in inside]),
        "bpb": floor_and_power([p["flops"] for p in points], [p["val_bpb"] for p in points]),
    }  # fmt: skip


def describe(fit: dict | None, name: str) -> str:
    if fit is None:
        return f"{name}: too few points"
    error = f" +- {fit['error']:.3f}" if fit["error"] is not None else ""
    if "floor" in fit:
        return f"{name} = {fit['floor']:.3f} + {fit['factor']:.3g} FLOPs ^ -({fit['exponent']:.3f}{error})"
    return f"{name} ~ FLOPs ^ {fit['exponent']:.3f}{error}"


def plot(rows: list[dict], result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    best, inside = result["budgets"], [b for b in result["budgets"] if b["weights"]]
    size = {"ncols": 3 if best else 1, "figsize": (15 if best else 7, 4.5)}
    figure, axes = plt.subplots(**size, layout="constrained", squeeze=False)
    axes, points = axes[0], best or rows
    if best:
        for group, found in zip(budgets(rows), best, strict=True):
            x = np.array([row["weights"] for row in group])
            fine = np.geomspace(x.min(), x.max(), 50)
            (line,) = axes[1].plot(
                x, [row["val_bpb"] for row in group], "o", label=f"{found['flops']:.1e} FLOPs"
            )
            axes[1].plot(
                fine, np.polyval(found["curve"], np.log(fine)), color=line.get_color(), lw=1
            )
            if found["weights"]:
                axes[1].plot(found["weights"], found["val_bpb"], "*", ms=14, color=line.get_color())
        axes[1].set(
            xscale="log", xlabel="weights", ylabel="bits per byte", title="sizes for one budget"
        )
        axes[1].legend(fontsize=8)
        for key, color in (("weights", "#c0392b"), ("tokens", "#2f6f9f")) if inside else ():
            axes[2].plot([b["flops"] for b in inside], [b[key] for b in inside], "o", color=color,
                         label=describe(result[key], key))  # fmt: skip
            if fit := result[key]:
                x = np.geomspace(
                    min(b["flops"] for b in inside), max(b["flops"] for b in inside), 50
                )
                axes[2].plot(x, fit["factor"] * x ** fit["exponent"], color=color, lw=1)
        axes[2].set(xlabel="FLOPs", title="best weights and tokens")
        if inside:  # an empty axis cannot be logarithmic
            axes[2].set(xscale="log", yscale="log")
            axes[2].legend(fontsize=8)
    x = np.array([p["flops"] for p in points])
    axes[0].plot(x, [p["val_bpb"] for p in points], "o", color="#2f6f9f")
    if fit := result["bpb"]:
        fine = np.geomspace(x.min(), x.max(), 100)
        axes[0].plot(
            fine, fit["floor"] + fit["factor"] * fine ** -fit["exponent"], color="#2f6f9f", lw=1
        )
    for row in [] if best else rows:
        axes[0].annotate(f"{row['num_layers']} layers", (row["flops"], row["val_bpb"]), fontsize=8)
    axes[0].set(xscale="log", xlabel="FLOPs (6 x weights x tokens)", ylabel="bits per byte")
    axes[0].set_title(describe(result["bpb"], "bpb"), fontsize=9)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with run directories")
    parser.add_argument(
        "--out", type=Path, help="where results.csv and scaling.png go (default: the folder)"
    )
    args = parser.parse_args()
    out, found = (
        args.out or args.folder,
        sorted(path.parent for path in args.folder.glob("*/report.md")),
    )
    if not found:
        sys.exit(f"error: {args.folder} holds no finished run; train some with runs/miniseries.sh")
    rows = sorted(map(read_run, found), key=lambda row: (row["flops"], row["weights"]))
    out.mkdir(parents=True, exist_ok=True)
    with (out / "results.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    result = analyse(rows)
    plot(rows, result, out / "scaling.png")
    print(
        f"{'run':28}{'layers':>7}{'width':>7}{'weights':>14}{'tokens':>15}{'FLOPs':>10}{'bpb':>9}{'CORE':>9}{'seconds':>10}"
    )
    for r in rows:
        core = f"{r['core']:9.4f}" if r["core"] is not None else f"{'':9}"
        print(f"{r['run']:28}{r['num_layers']:7}{r['width']:7}{r['weights']:14,}{r['tokens']:15,}{r['flops']:10.2e}"
              f"{r['val_bpb']:9.4f}{core}{r['train_seconds']:10.1f}")  # fmt: skip
    for budget in result["budgets"]:
        size = f"{budget['weights']:,.0f} weights, {budget['tokens']:,.0f} tokens" if budget["weights"] else \
            "no minimum between the smallest and the largest size; train others"  # fmt: skip
        print(f"{budget['flops']:.2e} FLOPs: {size}")
        del budget["curve"]
    for key in ("weights", "tokens", "bpb"):
        if result["budgets"] or key == "bpb":
            print(describe(result[key], key))
    print(f"{out / 'results.csv'}, {out / 'scaling.png'}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
