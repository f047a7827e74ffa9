"""Writes the report of run directories: report.md with a table, the loss curve, and samples.

    python runs/report.py out/RUN
    python runs/report.py out/RUN out/OTHER --no-samples     needs no PyTorch
    python runs/report.py out/RUN --against @runs/p34.args   compares it with another run or an entry in baselines/

Every training run ends with a report. It can be written again at any time, even during a run. Samples come from the
newest checkpoint: continuations of three held-out documents after pretraining, answers to three questions after
finetuning. After reinforcement learning the report shows answers to held-out questions before and after, from the log.
"""

import argparse
import sys
from pathlib import Path

from lib.command import run_command
from lib.report import write_report  # the training scripts take it from here


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--no-samples", action="store_true", help="only the table and the curve, without PyTorch")
    parser.add_argument("--against", metavar="RUN", help="run, entry or @runs/NAME.args to plot for comparison")
    device = "device for samples: cuda, mps or cpu (default: the best available)"
    parser.add_argument("--device", metavar="NAME", help=device)
    args = parser.parse_args(argv)

    def work() -> None:
        for run_dir in args.runs:
            write_report(run_dir, not args.no_samples, args.device, against=args.against)

    return run_command(work)


if __name__ == "__main__":
    sys.exit(main())
