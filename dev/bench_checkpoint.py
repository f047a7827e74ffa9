"""What hashing, reading back and syncing add to saving and loading a checkpoint, each stated apart.

    python dev/bench_checkpoint.py out/bench_checkpoint              0.4 GB, as a small model on a CPU has
    python dev/bench_checkpoint.py DIR --gigabytes 4.4 --repeat 5    the size of train_small.py's

DIR should lie on the disk that runs are written to; what is written there is removed again. The table
gives medians of the time and of the processor time, and the range of the time. Files are read from the
page cache, as they are right after a save; --cold asks the kernel to drop them first.
"""

import argparse
import os
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train_small as ts


def forget(path: Path) -> None:
    """Drops a file from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def measure(folder: Path, tensors: dict, cold: bool) -> dict[str, tuple[float, float]]:
    """Seconds and processor seconds: of each part of one file, and of what the script does with three."""
    path = folder / "tensors.safetensors"
    seconds = {}

    def clock(name: str, function):
        begin = time.perf_counter()
        cpu = time.process_time()
        value = function()
        seconds[name] = (time.perf_counter() - begin, time.process_time() - cpu)
        return value

    def same(written: dict) -> bool:
        return all(torch.equal(written[name], tensors[name]) for name in tensors)

    clock("write", lambda: save_file(tensors, path))
    clock("sync", lambda: ts.sync_to_disk(path))
    clock("read back and compare", lambda: same(load_file(path)))
    clock("hash", lambda: ts.file_sha256(path))
    if cold:
        forget(path)
    clock("load: hash", lambda: ts.file_sha256(path))
    clock("load: read", lambda: {name: tensor.clone() for name, tensor in load_file(path).items()})
    path.unlink()

    names = list(tensors)
    parts = [{name: tensors[name] for name in names[i::3]} for i in range(3)]
    paths = [folder / name for name in ts.CHECKPOINT_FILES]
    with ThreadPoolExecutor() as pool:
        clock("all of saving", lambda: list(pool.map(ts.write_tensors, paths, parts)))
        for path in paths if cold else ():
            forget(path)
        clock("all hashes of loading", lambda: list(pool.map(ts.file_sha256, paths)))
    for path in paths:
        path.unlink()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--gigabytes", type=float, default=0.4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    existed = args.folder.exists()
    args.folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(args.folder).free
    if free < 1.2e9 * args.gigabytes:
        print(f"error: {args.folder} has {free / 1e9:.1f} GB free; name another", file=sys.stderr)
        return 1

    rows = int(args.gigabytes * 1e9 / 4 / 9 / 1024)
    tensors = {f"bank_{i}": torch.randn(rows, 1024) for i in range(9)}
    runs = [measure(args.folder, tensors, args.cold) for _ in range(args.repeat)]
    if not existed:
        args.folder.rmdir()

    print(f"{args.gigabytes} GB, {args.repeat} times, {os.cpu_count()} cores\n")
    print("| part | seconds | from | to | processor seconds |\n| --- | ---: | ---: | ---: | ---: |")
    medians = {}
    for name in runs[0]:
        values = sorted(run[name][0] for run in runs)
        cpu = statistics.median(run[name][1] for run in runs)
        medians[name] = statistics.median(values)
        print(f"| {name} | {medians[name]:.2f} | {values[0]:.2f} | {values[-1]:.2f} | {cpu:.2f} |")
    save = medians["all of saving"] / medians["write"]
    load = 1 + medians["all hashes of loading"] / medians["load: read"]
    print(f"\nsaving takes {save:.1f} times a plain write, loading {load:.1f} times a plain read")
    return 0


if __name__ == "__main__":
    sys.exit(main())
