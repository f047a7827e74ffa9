"""Checks flags for multi_node.sh before torchrun starts; prints the processes of each machine.

    python runs/cluster/check_nodes.py SCRIPT NODES GPUS [flags of SCRIPT]     GPUS may be empty
"""

import importlib
import sys
from pathlib import Path

import torch


def main(path: str, nodes: str, gpus: str, *argv: str) -> None:
    count = int(gpus or torch.cuda.device_count() or 1)
    sys.path[:1] = [str(Path(path).parent)]
    script = importlib.import_module(Path(path).stem)
    if hasattr(script, "Pretraining"):  # a training script; tools check their flags themselves
        try:
            config = script.make_config(script.build_parser().parse_args(argv))
            pretraining = script.Pretraining(config)
            min_nodes, _, max_nodes = nodes.partition(":")
            for machines in range(int(min_nodes), int(max_nodes or min_nodes) + 1):
                # As process 1, which leaves warnings to process 0.
                pretraining.check(script.Ranks(1, machines * count, torch.device("cpu")))
        except script.UserError as error:
            sys.exit(f"error: {error}")
    print(count)


if __name__ == "__main__":
    main(*sys.argv[1:])
