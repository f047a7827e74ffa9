"""Prints a line "depth tokens" for each depth of train_medium.py: the tokens that use up a budget of FLOPs.

    python runs/lib/scaling_plan.py FLOPS "8 10 12" [flags of train_medium.py]

FLOPs are 6 x weights x tokens. The script counts the weights, with the vocabulary of the dataset.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import train_medium as script


def main() -> None:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout, allow_abbrev=False)
    parser.add_argument("flops", metavar="FLOPS", type=float, help="budget of FLOPs, e.g. 3e17")
    parser.add_argument("depths", metavar="DEPTHS", help='numbers of layers, e.g. "8 10 12"')
    args, flags = parser.parse_known_args()
    for depth in args.depths.split():
        argv = ["--num-layers", depth, *flags]
        config = script.make_config(script.build_parser().parse_args(argv))
        vocab_size = script.Dataset.open(config.data).tokenizer.vocab_size
        weights = script.matmul_weights(dataclasses.replace(config, vocab_size=vocab_size))
        print(depth, round(args.flops / 6 / weights))


if __name__ == "__main__":
    try:
        main()
    except script.UserError as error:
        sys.exit(f"error: {error}")
