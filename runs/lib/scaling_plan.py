"""Prints a line "depth tokens" for each depth of train_medium.py: the tokens that use up a budget of FLOPs.

    python runs/lib/scaling_plan.py FLOPS "8 10 12" [flags of train_medium.py]

FLOPs are 6 x weights x tokens. The script counts the weights, with the vocabulary of the dataset.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))
import train_medium as script


def main(flops: str, depths: str, *flags: str) -> None:
    for depth in depths.split():
        argv = ["--num-layers", depth, *flags]
        config = script.make_config(script.build_parser().parse_args(argv))
        vocab_size = script.Dataset.open(config.data).tokenizer.vocab_size
        weights = script.matmul_weights(dataclasses.replace(config, vocab_size=vocab_size))
        print(depth, round(float(flops) / 6 / weights))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except script.UserError as error:
        sys.exit(f"error: {error}")
