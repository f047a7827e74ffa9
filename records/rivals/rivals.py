"""Trains other projects' recipes on this project's text and scores the same bytes; README.md says what is changed.

    python records/rivals/rivals.py prepare --modded ../modded-nanogpt --nanochat ../nanochat
    python records/rivals/rivals.py modded --data data/shards/p34 --divide 8 --seeds 0,1,2
    python records/rivals/rivals.py nanochat --data data/shards/p34 --batch 32768
    python records/rivals/rivals.py gpt --data data/shards/p34 --lr 0.001
    python records/rivals/rivals.py cpu
    python records/rivals/rivals.py results

`prepare` makes the copies that `modded`, `nanochat` and `cpu` run; it needs clones of both projects, and nothing after
it needs a network. Each run writes one log, DIR/TAG.log.gz; `results` checks the logs and prints them as a table.
"""

import argparse
import gzip
import importlib.metadata
import io
import json
import math
import os
import platform
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from rival_text import Text, UserError

HERE = Path(__file__).resolve().parent
TOKENS = {"p34": 34_013_184, "p100": 100_000_000}  # as runs/p34.args and runs/p100.args
CLONES = {
    "modded": ("https://github.com/KellerJordan/modded-nanogpt", "f411b3d346aa52d3504324ca93c230fd84c6c07f"),
    "nanochat": ("https://github.com/karpathy/nanochat", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd"),
}

# The changes to modded-nanogpt: (file, text that occurs once, what takes its place). What `rival` does is in
# modded_hooks.py. nanochat is not changed: nanochat_run.py replaces some of its functions while it runs.
CHANGES = (
    ("train_gpt.py", "import tiktoken\n", "import modded_hooks as rival\ntiktoken = rival\n"),
    ("train_gpt.py", "grad_accum_steps = 8 // world_size", "grad_accum_steps = rival.grad_accum_steps"),
    ("train_gpt.py", " - Confirm.\n", " - Confirm.\nrival.change(globals())\n"),
    ("train_gpt.py", "vocab_size=50257,", "vocab_size=rival.vocab_size,"),
    (
        "train_gpt.py",
        "dist.reduce(val_loss, 0, op=dist.ReduceOp.AVG)\n",
        "rival.report(val_loss, training_time_ms, step)\n",
    ),
    ("triton_kernels.py", "CE_KERNEL_VOCAB_SIZE = 50304", "CE_KERNEL_VOCAB_SIZE = 32768"),
)


# -- copies


def git(clone: Path, rival: str, *command: str) -> bytes:
    """Output of a git command in a clone, which must hold the commit."""
    url, commit = CLONES[rival]
    found = subprocess.run(["git", "-C", clone, *command], capture_output=True)
    if found.returncode:
        raise UserError(f"{clone} is not a clone of {url} with commit {commit[:8]}; run `git clone {url} {clone}`")
    return found.stdout


def replace_once(text: str, old: str, new: str, where: str) -> str:
    """Raises: UserError if `old` does not occur exactly once"""
    if text.count(old) != 1:
        raise UserError(f"{where} holds {old.strip()!r} {text.count(old)} times, not once: it is not the file expected")
    return text.replace(old, new)


def prepare_modded(clone: Path, out: Path) -> None:
    commit = CLONES["modded"][1]
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train_gpt.py", "triton_kernels.py", "dc_triton_kernels.py"):
        text = git(clone, "modded", "show", f"{commit}:{name}").decode()
        for file, old, new in CHANGES:
            if file == name:
                text = replace_once(text, old, new, f"{name} of modded-nanogpt")
        (out / name).write_text(text)
        compile(text, name, "exec")


def prepare_nanochat(clone: Path, out: Path) -> None:
    content = git(clone, "nanochat", "archive", CLONES["nanochat"][1], "nanochat", "scripts")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(out, filter="data")


def prepare_all(args: argparse.Namespace) -> None:
    if not (args.modded or args.nanochat):
        ways = " and ".join(f"`git clone {url}`" for url, _ in CLONES.values())
        raise UserError(f"no clone given; make clones with {ways}, and pass them with --modded and --nanochat")
    for rival, make in {"modded": prepare_modded, "nanochat": prepare_nanochat}.items():
        if clone := getattr(args, rival):
            folder = args.out / rival
            shutil.rmtree(folder, ignore_errors=True)
            make(clone, folder)
            print(f"{folder}: {rival} {CLONES[rival][1][:8]}")


def copy_of(rival: str, args: argparse.Namespace) -> Path:
    """Folder of the copy that `prepare` made."""
    folder = (args.out / rival).resolve()
    if not folder.is_dir():
        url = CLONES[rival][0]
        raise UserError(
            f"no copy of {rival} at {folder}; make it with `git clone {url} CLONE` and "
            f"`python records/rivals/rivals.py prepare --{rival} CLONE`"
        )
    return folder


# -- runs


def settings_of(rival: str, args: argparse.Namespace, max_seq_len: int = 2048) -> dict:
    """What all rivals share."""
    tokens = args.tokens or TOKENS.get(args.data.name)
    if not tokens:
        raise UserError(f"the number of training tokens is unknown for {args.data}; set it with --tokens")
    if not args.smoke and args.gpu != "" and not ask_gpu("name", args.gpu):
        raise UserError(f"{rival} needs an NVIDIA GPU, and nvidia-smi finds none; the command `cpu` needs none")
    settings = {"rival": rival, "data": str(args.data.resolve()), "tokens": tokens, "max_seq_len": max_seq_len}
    settings["val_every"] = args.val_every
    return settings | {"limit": 16 if args.smoke else None, "smoke": args.smoke}


def run_modded(args: argparse.Namespace) -> None:
    folder = copy_of("modded", args)
    if not ask_gpu("name", args.gpu):
        raise UserError("modded-nanogpt needs an NVIDIA GPU; nvidia-smi finds none")
    settings = settings_of("modded", args)
    settings |= {"divide": args.divide, "lr": args.lr, "mlp": args.mlp, "attention": args.attention}
    if args.smoke:
        settings["tokens"] = 98304 * 8 // args.divide * 6
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if args.mlp == "bf16":
        variables["DISABLE_FP8"] = "1"
    train(args, settings, ["train_gpt.py"], folder, variables)


def run_nanochat(args: argparse.Namespace) -> None:
    settings = settings_of("nanochat", args, args.max_seq_len)
    depth = 2 if args.smoke else args.depth
    settings |= {"depth": depth, "batch": args.batch, "lr": args.lr, "fp8": args.fp8, "loader": args.loader}
    settings |= {"attention": args.attention, "flags": args.flags}
    settings["rows"] = args.rows or min(32, args.batch // args.max_seq_len)
    # Stated only where it is set, as here and below, so that other runs share a row with older logs.
    if args.steps:
        settings["steps"] = args.steps
    steps = 14 if args.smoke else args.steps or settings["tokens"] // args.batch
    command = ["--depth", depth, "--max-seq-len", args.max_seq_len, "--device-batch-size", settings["rows"]]
    command += ["--total-batch-size", args.batch, "--num-iterations", steps]
    command += ["--eval-every", args.val_every or 1_000_000]
    command += ["--core-metric-every", -1, "--sample-every", -1, *shlex.split(args.flags)]
    if args.fp8:
        command.append("--fp8")
    variables = {"NANOCHAT_BASE_DIR": str((args.out / "nanochat_files").resolve())}
    if not args.compile:
        settings["compile"] = False
        variables["TORCHDYNAMO_DISABLE"] = "1"
    script = [HERE / "nanochat_run.py", *map(str, command)]
    train(args, settings, script, copy_of("nanochat", args), variables)


def run_gpt(args: argparse.Namespace) -> None:
    settings = settings_of("gpt", args, args.max_seq_len)
    settings |= {"layers": args.layers, "width": args.width, "heads": args.heads, "batch": args.batch, "lr": args.lr}
    if args.smoke:
        settings |= {"layers": 2, "width": 64, "heads": 2}
    steps = 14 if args.smoke else args.steps or settings["tokens"] // args.batch
    settings |= {"steps": steps, "warmup": args.warmup or max(steps // 20, 1), "compile": args.compile}
    settings |= {"rows": args.rows or min(16, args.batch // args.max_seq_len)}
    train(args, settings, [HERE / "plain_gpt.py"], Path.cwd(), {})


def run_cpu(args: argparse.Namespace) -> None:
    """nanochat d4 and a plain GPT on the quickstart's text, as runs/cpu.args trains on it."""
    if not (args.data / "dataset.json").is_file():
        way = "python data/pretrain.py --source stdlib --vocab-size 4096 --out data/shards/stdlib"
        raise UserError(f"no dataset at {args.data}; make it with `{way}`")
    shared = vars(args) | {"max_seq_len": 512, "rows": 4, "batch": 2048, "tokens": args.steps * 2048, "steps": 0}
    shared |= {"gpu": "", "val_every": 0, "attention": "torch"}
    shared["flags"] = f"--aspect-ratio 48 --head-dim 64 {args.flags}".strip()
    if "nanochat" in args.rivals:
        own = {"depth": 4, "lr": args.nanochat_lr, "fp8": False, "loader": "stream"}
        run_nanochat(argparse.Namespace(**shared | own))
    if "gpt" in args.rivals:
        own = {"layers": 4, "width": 192, "heads": 3, "lr": args.gpt_lr, "warmup": 0}
        run_gpt(argparse.Namespace(**shared | own))


def ask_gpu(field: str, gpu: str | None) -> str | None:
    """A field of nvidia-smi, such as name or uuid, of the first visible GPU; None without one.

    gpu: as CUDA_VISIBLE_DEVICES; "" for none
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES") if gpu is None else gpu
    if gpu == "" or not shutil.which("nvidia-smi"):
        return None
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", *(["-i", gpu.split(",")[0]] if gpu else [])]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return lines[0] if lines else None


def tag_of(settings: dict) -> str:
    """Name of a log: text, rival, every setting, seed, so that no run overwrites the log of another one."""
    elsewhere = ("rival", "data", "limit", "smoke", "tokens", "seed")
    words = [Path(settings["data"]).name, settings["rival"]]
    words += [f"{k}-{v}" for k, v in settings.items() if k not in elsewhere and v not in (None, "")]
    words += [f"tokens-{settings['tokens']}", f"seed-{settings['seed']}"]
    return re.sub(r"[^\w.]+", "-", "_".join(words + ["smoke"] * settings["smoke"]))


def describe(settings: dict, gpu: str | None) -> dict:
    """The first line of a log: what ran on what."""
    text = Text(settings["data"], settings["max_seq_len"], settings["limit"])
    scored = {"targets": text.targets, "bytes": text.bytes, "sha256": text.scored_sha256()}
    dataset = {"name": text.name, "fingerprint": text.info["fingerprint"], "scored": scored}
    device = ask_gpu("name", gpu) or f"{os.cpu_count()} CPU cores, {platform.processor() or platform.machine()}"
    packages = {d.name: d.version for d in importlib.metadata.distributions() if d.name in ("torch", "triton")}
    machine = {"device": device, "gpu_uuid": ask_gpu("uuid", gpu), "python": platform.python_version(), **packages}
    shown = {name: value for name, value in settings.items() if name != "data"}
    commit = CLONES.get(settings["rival"], (None, None))[1]
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return {"settings": shown, "commit": commit, "dataset": dataset, "machine": machine, "date": date}


def train(args: argparse.Namespace, settings: dict, script: list, folder: Path, variables: dict) -> None:
    """One run for each seed; prints the result and keeps the log, compressed when the run has ended well."""
    for seed in args.seeds:
        settings = settings | {"seed": seed}
        path = (args.logs / f"{tag_of(settings)}.log").resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"{path.stem}: running, log in {path}", flush=True)

        paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
        if settings.get("attention") != "hub":
            paths.insert(0, str(HERE / "stand_ins"))
        environment = os.environ | variables | {"RIVAL_SETTINGS": json.dumps(settings), "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str((args.cache / "inductor").resolve())}
        environment |= {"TRITON_CACHE_DIR": str((args.cache / "triton").resolve())}
        if args.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = args.gpu

        with path.open("w") as log:
            print("RUN " + json.dumps(describe(settings, args.gpu)), file=log, flush=True)
            command = [sys.executable, *map(str, script)]
            ended = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        if ended.returncode:
            print("\n".join(path.read_text().splitlines()[-20:]), file=sys.stderr)
            raise UserError(f"the run ended with status {ended.returncode}; its log is {path}")

        compressed = path.with_suffix(".log.gz")
        content = path.read_text().replace(str(Path.cwd()), ".").replace(sys.prefix, "python")  # no paths of a machine
        compressed.write_bytes(gzip.compress(content.encode(), mtime=0))
        result = read_log(compressed)
        path.unlink()
        print(json.dumps({"log": compressed.name, **result["result"]}), flush=True)


# -- logs


def read_log(path: Path) -> dict:
    """The first line of a log, its result, and its validations as (steps, seconds, bpb), which end with the result.

    Raises: UserError if the log contradicts itself
    """
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    count = sum(line.startswith("RESULT ") for line in lines)
    if not lines or not lines[0].startswith("RUN ") or count != 1:
        raise UserError(f"{path} is not the log of a finished run: it has {count} results")
    run = json.loads(lines[0].removeprefix("RUN "))
    clock = {"modded": modded_clock, "nanochat": nanochat_clock, "gpt": gpt_clock}[run["settings"]["rival"]](lines)
    stated = [json.loads(line.partition(" ")[2]) for line in lines if line.startswith(("VALIDATION ", "RESULT "))]
    steps = [each["steps"] for each in stated]
    if steps[-1] != max(clock, default=0) or not clock.keys() >= set(steps):
        raise UserError(f"{path} states results after {steps} steps, but its lines have them after {sorted(clock)}")

    # nanochat prints its validations during training with six digits and without nats.
    printed = re.findall(r"^Step (\d+) \| Validation bpb: (\S+)", "\n".join(lines), re.MULTILINE)
    bpbs = {int(step): float(bpb) for step, bpb in printed}
    for each in stated:
        bpb = each["nats"] / math.log(2) / run["dataset"]["scored"]["bytes"]
        if abs(bpb - each["bpb"]) > 1e-6:
            raise UserError(f"{path} states {each['bpb']:.6f} bpb, but its nats give {bpb:.6f}")
        seconds = clock[each["steps"]]
        if abs(seconds - each["seconds"]) > 0.002 * seconds + 0.02:
            took = f"{each['steps']} steps in {each['seconds']:.2f} s"
            raise UserError(f"{path} states {took}, but its lines give {seconds:.2f} s")
        bpbs[each["steps"]] = bpb
    validations = [(step, clock[step], bpb) for step, bpb in sorted(bpbs.items())]
    return run | {"result": stated[-1], "validations": validations}


def modded_clock(lines: list[str]) -> dict[int, float]:
    """{steps: seconds} of the lines of its validations, before which it waits for the GPU."""
    found = re.findall(r"^step:(\d+)/\d+ val_loss:\S+ train_time:(\d+)ms", "\n".join(lines), re.MULTILINE)
    return {int(steps): int(milliseconds) / 1000 for steps, milliseconds in found}


def nanochat_clock(lines: list[str]) -> dict[int, float]:
    """{steps: seconds} of its validations; the first 11 steps, which its own clock leaves out, count as mean ones."""
    text = "\n".join(lines)
    times = [float(time) / 1000 for time in re.findall(r"^step \d+/.* dt: ([\d.]+)ms", text, re.MULTILINE)]
    counted = times[11:]
    times[:11] = [sum(counted) / max(len(counted), 1)] * min(11, len(times))
    validated = map(int, re.findall(r"^Step (\d+) \| Validation", text, re.MULTILINE))
    return {steps: sum(times[:steps]) for steps in (*validated, len(times))}


def gpt_clock(lines: list[str]) -> dict[int, float]:
    """{steps: seconds} of the last step line."""
    found = re.findall(r"^step (\d+)/\d+ loss \S+ seconds ([\d.]+)", "\n".join(lines), re.MULTILINE)
    return {int(found[-1][0]): float(found[-1][1])}


def grouped(logs: Path, smoke: bool = False) -> dict[tuple[str, str, str], list[dict]]:
    """The runs in a folder of logs by (text, device, settings): those that differ in their seed only."""
    runs = defaultdict(list)
    for path in sorted(logs.rglob("*.log.gz")):
        run = read_log(path)
        if smoke or not run["settings"]["smoke"]:
            settings = {name: value for name, value in run["settings"].items() if name not in ("seed", "val_every")}
            # Older logs say "sequence".
            settings = {"max_seq_len" if name == "sequence" else name: value for name, value in settings.items()}
            runs[run["dataset"]["name"], run["machine"]["device"], json.dumps(settings)].append(run)
    return dict(sorted(runs.items()))


def short_name(settings: dict) -> str:
    """What a picture calls a run with these settings."""
    if settings["rival"] == "nanochat":
        return f"nanochat d{settings['depth']}"
    return {"modded": "modded-nanogpt, record 89", "gpt": "plain GPT"}[settings["rival"]]


def results(args: argparse.Namespace) -> None:
    """Prints the runs as a table: seeds of equal settings on equal devices in one row, with their mean."""
    runs = grouped(args.logs, args.smoke)
    if not runs:
        raise UserError(f"{args.logs} has no full runs; pass --logs records/rivals/logs, or --smoke for tiny runs")
    print("| text | rival | settings | seeds | steps | tokens | val bpb | each | seconds | GiB | device |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |")
    hidden = {"rival", "tokens", "max_seq_len", "limit", "smoke", "steps", "rows", "compile"}
    for (name, device, key), same in runs.items():
        settings = json.loads(key)
        shown = ", ".join(f"{k} {v}" for k, v in settings.items() if k not in hidden and v not in ("", None))
        seeds = ", ".join(str(run["settings"]["seed"]) for run in same)
        found = [run["result"] for run in same]
        mean = statistics.mean(result["bpb"] for result in found)
        each = ", ".join(f"{result['bpb']:.4f}" for result in found)
        seconds = ", ".join(f"{result['seconds']:.1f}" for result in found)
        first = found[0]
        gib = f"{first['gib']:.1f}" if first["gib"] else ""
        print(
            f"| {name} | {settings['rival']} | {shown} | {seeds} | {first['steps']:,} | {first['tokens']:,} "
            f"| {mean:.4f} | {each} | {seconds} | {gib} | {device} |"
        )


# -- command line


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, default=Path("out/rivals"), metavar="DIR", help="folder of the copies")
    shared.add_argument("--logs", type=Path, default=Path("out/rivals/logs"), metavar="DIR", help="folder of the logs")
    shared.add_argument("--smoke", action="store_true", help="tiny run; with `results`: rows of tiny runs too")

    run = argparse.ArgumentParser(add_help=False, parents=[shared])
    run.add_argument("--seeds", type=seeds, default=[0], metavar="0,1,2", help="seeds, one run each")
    run.add_argument("--cache", type=Path, default=Path("out/cache/rivals"), metavar="DIR", help="compiled kernels")

    on_gpu = argparse.ArgumentParser(add_help=False, parents=[run])
    on_gpu.add_argument("--data", type=Path, default=Path("data/shards/p34"), metavar="DIR", help="dataset directory")
    on_gpu.add_argument("--tokens", type=int, help="training tokens; by default those of P34 or P100")
    on_gpu.add_argument("--val-every", type=int, default=0, help="steps between validations; 0: only at the end")
    on_gpu.add_argument("--gpu", help='index of the GPU, or "" for the CPU; by default the first visible GPU')
    attention = {"default": "torch", "choices": ("torch", "fa4", "hub")}
    attention["help"] = "torch's varlen attention, flash-attn-4, or FlashAttention 3 from the Hugging Face hub"
    batch = argparse.ArgumentParser(add_help=False, parents=[on_gpu])
    batch.add_argument("--batch", type=int, default=65536, help="tokens in a step")
    batch.add_argument("--rows", type=int, default=0, help="rows in a micro-batch; 0: the rival's own number")
    batch.add_argument("--max-seq-len", type=int, default=2048, help="tokens in a row, and of a held-out document")
    batch.add_argument("--steps", type=int, default=0, help="steps, instead of --tokens")
    no_compile = {"dest": "compile", "action": "store_false", "help": "eager execution"}
    batch.add_argument("--no-compile", **no_compile)

    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add = commands.add_parser("prepare", parents=[shared], help="make the copies of the rivals from clones")
    add.add_argument("--modded", type=Path, metavar="CLONE", help="clone of modded-nanogpt")
    add.add_argument("--nanochat", type=Path, metavar="CLONE", help="clone of nanochat")
    add.set_defaults(action=prepare_all)

    add = commands.add_parser("modded", parents=[on_gpu], help="modded-nanogpt, record 89")
    add.add_argument("--divide", type=int, default=8, choices=(1, 2, 4, 8, 16), help="divisor of its batches")
    add.add_argument("--lr", type=float, default=1.0, help="factor on all its learning rates")
    add.add_argument("--mlp", default="bf16", choices=("bf16", "fp8"), help="precision of its MLP")
    add.add_argument("--attention", **attention)
    add.set_defaults(action=run_modded)

    add = commands.add_parser("nanochat", parents=[batch], help="nanochat")
    add.add_argument("--depth", type=int, default=12, help="number of layers, which sets the width")
    add.add_argument("--lr", type=float, default=1.0, help="factor on all its learning rates")
    add.add_argument("--fp8", action="store_true", help="training in fp8")
    add.add_argument("--loader", default="bestfit", choices=("bestfit", "stream"), help="its document order, or ours")
    add.add_argument("--attention", **attention)
    add.add_argument("--flags", default="", help="more flags for its scripts/base_train.py, in one string")
    add.set_defaults(action=run_nanochat)

    add = commands.add_parser("gpt", parents=[batch], help="a plain GPT-2 with AdamW")
    add.add_argument("--layers", type=int, default=12, help="number of layers")
    add.add_argument("--width", type=int, default=768, help="width")
    add.add_argument("--heads", type=int, default=12, help="attention heads")
    add.add_argument("--lr", type=float, default=0.001, help="peak learning rate")
    add.add_argument("--warmup", type=int, default=0, help="warm-up steps; by default a twentieth of all")
    add.set_defaults(action=run_gpt)

    add = commands.add_parser("cpu", parents=[run], help="nanochat d4 and a plain GPT on the quickstart's text")
    add.add_argument("--data", type=Path, default=Path("data/shards/stdlib"), metavar="DIR", help="dataset directory")
    both = ("nanochat", "gpt")
    add.add_argument("--rivals", nargs="+", default=both, choices=both, help="rivals to run (default: both)")
    add.add_argument("--steps", type=int, default=600, help="steps of 2,048 tokens")
    add.add_argument("--nanochat-lr", type=float, default=8.0, help="factor on nanochat's learning rates")
    add.add_argument("--gpt-lr", type=float, default=0.001, help="peak learning rate of the plain GPT")
    add.add_argument("--flags", default="", help="more flags for nanochat's scripts/base_train.py, in one string")
    add.add_argument("--no-compile", **no_compile)
    add.set_defaults(action=run_cpu)

    add = commands.add_parser("results", parents=[shared], help="check the logs and print a table")
    add.set_defaults(action=results)
    return parser


def seeds(text: str) -> list[int]:
    return [int(seed) for seed in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    args.action(args)


if __name__ == "__main__":
    main()
