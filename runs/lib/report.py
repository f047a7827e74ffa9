"""The report of a run: table, figure and samples."""

import contextlib
import gzip
import html
import itertools
import json
from pathlib import Path
from statistics import fmean

from lib import chat_format
from lib.command import RunError, error_message, first_line, print_note

# What the table shows of result.json, or of log.jsonl before there is one.
METRICS = {
    "val_bpb": ("validation", "{:.4f} bits per byte"),
    "val_loss": ("validation", "{:.4f} nats per target"),
    "ndcg@10": ("nDCG@10", "{:.4f}"),
    "bm25_ndcg@10": ("nDCG@10 of BM25", "{:.4f}"),
    "recall@10": ("recall@10", "{:.4f}"),
    "bm25_recall@10": ("recall@10 of BM25", "{:.4f}"),
    "tokens": ("tokens", "{:,}"),
    "steps": ("steps", "{:,}"),
    "train_seconds": ("training time", "{:.1f} s"),
    "tokens_per_second": ("speed", "{:,.0f} tokens/s"),
    "mfu": ("MFU", "{:.1%}"),
    "peak_memory_gib": ("peak memory", "{:.1f} GiB"),
}
SCORES = ("val_bpb", "val_loss", "ndcg@10", "recall@10")

TRAINING = {"color": "#9bb8d3"}
MEAN = {"color": "#2c6fa3"}
HELD_OUT = {"color": "#c0392b", "marker": "o", "markersize": 3}
HELD_OUT_SAMPLED = {"color": "#c0392b", "marker": ".", "linestyle": ":"}

# The unit of a plot, and its curves: what log.jsonl calls them, what the legend does, their style.
PLOTS = {
    "bits per byte": [
        ("bpb", "training (estimate)", TRAINING),
        ("val_bpb", "validation", HELD_OUT),
    ],
    "loss, nats": [("loss", "training", TRAINING), ("val_loss", "validation", HELD_OUT)],
    "nDCG@10": [("ndcg@10", "held out", HELD_OUT)],
    "reward, accuracy": [
        ("reward", "mean reward of a step", TRAINING),
        ("mean_reward", "mean of 20 steps", MEAN),
        ("greedy", "held out, greedy", HELD_OUT),
        ("pass@1", "held out, pass@1", HELD_OUT_SAMPLED),
    ],
}
SMOOTHED = 20  # steps in mean_reward

PROMPT_TOKENS = 8  # of a held-out document
PROMPTS = ("Once upon a time", "The most important thing is", "In the year")  # without the dataset
CONTINUATION = {"max_tokens": 100, "temperature": 0.5}
QUESTIONS = ("Hello! Who are you?", "Why is the sky blue?", "Write a Python function that adds two numbers.")
ANSWER = {"max_tokens": 128, "temperature": 0.0}


# ---- what a run has written


def read_log(run_dir: Path) -> list[dict]:
    """The entries of log.jsonl; a run may still be writing the last line."""
    lines = (run_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def read_reference(name: str) -> list[dict]:
    """The log of a run, or of an entry's first seed; @runs/NAME.args means its newest entry."""
    folder = Path(name)
    if name.startswith("@"):
        root = Path(__file__).resolve().parents[2]
        entries = [path.parent for path in (root / "baselines").glob(f"*/{folder.name}")]
        if not entries:
            raise RunError(f"no entry in baselines/ used {name}; records/CURVES.md lists the recipes that have one")
        folder = max(entries, key=last_start)
    elif folder.suffix == ".args":
        raise RunError(f"{name} is not a run; an args file is given as @{name}")
    logs = sorted(folder.glob("log_*.jsonl.gz"))
    if not logs:
        return read_log(folder)
    return [json.loads(line) for line in gzip.decompress(logs[0].read_bytes()).splitlines()]


def last_start(entry: Path) -> str:
    """When the last run of an entry started; the day of an entry whose runs do not say."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in entry.glob("run_*.json")]
    return max((start["date"] for run in runs for start in run["starts"]), default=entry.name[:10])


def read_result(run_dir: Path, entries: list[dict]) -> dict:
    """result.json, or the newest metrics of the log of a run that has none."""
    path = run_dir / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else latest(entries)


def latest(entries: list[dict]) -> dict:
    """The newest value of each metric in a log."""
    newest = {name: value for entry in entries for name, value in entry.items()}
    return newest | {"steps": newest.get("step", 0), "peak_memory_gib": newest.get("memory_gib", 0)}


# ---- the table


def metric_rows(entries: list[dict], result: dict) -> dict:
    """The metrics of a run, without those that were not measured (0)."""
    rows = {}
    for name, (label, form) in METRICS.items():
        if result.get(name):
            rows[label] = form.format(result[name])
            first = next((entry for entry in entries if name in entry), {})
            if name in SCORES and first.get("step") == 0:  # what finetuning started from
                rows[f"{label}, before"] = form.format(first[name])
    return rows


def machine_rows(description: dict, result: dict) -> dict:
    """The device of the last start, and what it cost."""
    machines = [start.get("machine") for start in description.get("starts", [description])]
    machine = machines[-1]
    if not machine:
        return {}
    rows = {}
    if len({each["num_devices"] for each in machines}) == 1:
        hours = result.get("train_seconds", 0) * machine["num_devices"] / 3600
        rows["device hours"] = f"{hours:.4f}"
    return rows | {
        "device": f"{machine['num_devices']} x {machine['device']}",
        "torch": machine["torch"],
        "commit": machine["git_commit"][:12] + (" (changed)" if machine["git_dirty"] else ""),
    }


def setting_rows(description: dict) -> dict:
    """What a run trained on, and what it started from."""
    rows = {}
    if settings := description.get("finetune") or description.get("finetune_encoder"):
        source = Path(settings["run"]).resolve().name
        rows["finetuned from"] = f"{source} {settings['checkpoint']}"
    if settings := description.get("rl"):
        digits = f" of {settings['digits']}-digit numbers"
        rows["task"] = settings["task"] + (digits if settings["task"] == "addition" else "")
        rows["answers of a step"] = f"{settings['prompts']} questions x {settings['samples']}"
        rates = f"{settings['muon_lr']:g} (matrices) and {settings['adam_lr']:g} (rest)"
        rows["learning rates"] = f"{rates} times pretraining's, falling to 0"
        rows["started from"] = Path(settings["source"]).resolve().name
        rows["seed"] = settings["seed"]
    elif "config" in description:
        rows["data"] = description["config"]["data"]
    else:  # runs/huggingface/finetune_hf.py
        rows["model"] = description["model_name"]
    return rows


def table_rows(description: dict, entries: list[dict], result: dict) -> dict:
    """All rows of the table: a label and a value each, metrics first."""
    return metric_rows(entries, result) | machine_rows(description, result) | setting_rows(description)


def table(header: str, ruler: str, rows: list) -> str:
    """A table in markdown; header and ruler are its first two lines, rows are lists of cells."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([header, ruler, *lines]) + "\n"


# ---- the figure


def plotted(entries: list[dict]) -> list[str]:
    """The plots of PLOTS for what a run logs."""
    logged = {name for entry in entries for name, value in entry.items() if value}
    if "reward" in logged or "greedy" in logged:
        return ["reward, accuracy"]
    if "val_bpb" in logged or "bpb" in logged:
        return ["bits per byte"]
    return ["loss, nats"] + ["nDCG@10"] * ("ndcg@10" in logged)


def smooth_rewards(entries: list[dict]) -> list[dict]:
    """More entries, with the mean reward of the last SMOOTHED steps."""
    steps = [entry for entry in entries if "reward" in entry]
    smoothed = []
    for end in range(SMOOTHED, len(steps) + 1):
        mean = fmean(entry["reward"] for entry in steps[end - SMOOTHED : end])
        smoothed.append({"step": steps[end - 1]["step"], "mean_reward": mean})
    return smoothed


def plot_curves(entries: list[dict], title: str, references: dict[str, list[dict]]):
    """A matplotlib Figure with a plot for each unit. References, by name, are drawn in grey."""
    from matplotlib.figure import Figure

    units = plotted(entries)
    figure = Figure(figsize=(7 * len(units), 4), layout="constrained")
    figure.suptitle(title, parse_math=False)
    for axes, unit in zip(figure.subplots(1, len(units), squeeze=False)[0], units, strict=True):
        by_step = unit == "reward, accuracy"  # such a step has as many tokens as were sampled
        if by_step:
            entries = entries + smooth_rewards(entries)
        for run, log in {"": entries, **references}.items():
            grey = {"color": "0.5", "zorder": 1} if run else {}
            for name, label, style in PLOTS[unit]:
                points = [entry for entry in log if name in entry]
                x = [entry["step"] if by_step else entry["tokens"] / 1e6 for entry in points]
                y = [entry[name] for entry in points]
                if points:
                    axes.plot(x, y, label=f"{run} {label}".strip(), **style | grey)
        axes.set(xlabel="step" if by_step else "training tokens, millions", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


# ---- samples


def held_out_prompts(run) -> list[list[int]]:
    """Ids of the first words of three held-out documents; of PROMPTS without the dataset."""
    try:
        dataset = run.script.Dataset.open(run.config.data)
        documents = run.script.validation_documents(dataset, run.config)
        long = (ids for ids, _ in documents if len(ids) > PROMPT_TOKENS + 1)
        return [ids[: PROMPT_TOKENS + 1].tolist() for ids in itertools.islice(long, len(PROMPTS))]
    except run.script.UserError:
        return [[run.tokenizer.bos_id, *run.tokenizer.encode(prompt)] for prompt in PROMPTS]


def sample_texts(run, command: str) -> list[str]:
    """QUESTIONS and the most likely answers after finetuning, else prompts and continuations."""
    import engine

    generate = engine.Generator(run.model, run.tokenizer).generate
    if command == "finetune":
        prompts = [chat_format.question_ids(run.tokenizer, question) for question in QUESTIONS]
        stop = (run.tokenizer.specials[chat_format.ASSISTANT_END],)
        answers = map(run.tokenizer.decode, generate(prompts, stop=stop, **ANSWER))
        return [f"{question}\n\n{answer}" for question, answer in zip(QUESTIONS, answers, strict=True)]
    prompts = held_out_prompts(run)
    continuations = generate(prompts, seed=run.config.seed, **CONTINUATION)
    # Together, because a character may begin in the prompt and end after it.
    return [run.tokenizer.decode(a[1:] + b) for a, b in zip(prompts, continuations, strict=True)]


def samples(run_dir: Path, command: str, device: str | None, live) -> tuple[list[str], str]:
    """Samples of the newest checkpoint or a live model, and their heading or why there are none."""
    import engine

    try:
        run = engine.Run(*live) if live else engine.load_run(run_dir, device=device)
        texts = sample_texts(run, command)
    except Exception as error:  # whatever it is, the table and the curve are written
        return [], f"no samples: {error_message(error) or first_line(error)}"
    return texts, f"## Samples of step {run.step:,}"


# ---- the report


def cell(text: str) -> str:
    """A text as a cell of a table."""
    text = html.escape(text, quote=False)
    return text.replace("|", "&#124;").replace("\r", "").replace("\n", "<br>")


def score_table(before: dict, after: dict) -> str:
    """Accuracies on held-out questions in two log entries."""
    rows = []
    for name in before:
        if name == "greedy" or name.startswith("pass@"):
            points = 100 * (after[name] - before[name])
            rows.append((name, f"{before[name]:.1%}", f"{after[name]:.1%}", f"{points:+.1f}"))
    return table("| held out | before | after | points |", "| --- | ---: | ---: | ---: |", rows)


def answer_table(before: dict, after: dict) -> str:
    """Greedy answers to the first held-out questions in two evaluations."""
    rows = []
    # With more ranks than before, the first one may have had fewer questions.
    for a, b in zip(before["answers"], after["answers"], strict=False):
        first, last = (f"{entry['reward']:.2f}" for entry in (a, b))
        texts = a["question"], a["expected"], a["answer"], b["answer"]
        question, expected, before_text, after_text = map(cell, texts)
        rows.append((question, expected, before_text, first, after_text, last))
    header = "| question | expected | before | reward | after | reward |"
    return table(header, "| --- | --- | --- | ---: | --- | ---: |", rows)


def write_report(
    run_dir: Path, with_samples=True, device: str | None = None, live=None,
    result: dict | None = None, against: str | None = None,
) -> None:  # fmt: skip
    """Writes report.md and curve.png of one run; prints the samples.

    Args:   with_samples needs PyTorch; device "cuda", "mps" or "cpu", None: the best there is; live
            (script, model, tokenizer, config, step) of a run that has just ended; result what it
            will write to result.json; against names what is drawn beside it, see read_reference
    Raises: RunError if the run has not started
    """
    try:
        description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        entries = read_log(run_dir)
        references = {against: read_reference(against)} if against else {}
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(f"there is no {error.filename}; pass the directory of a run that has started") from None
    logs = itertools.chain(entries, *references.values())
    scored = {str(entry["scored"]) for entry in logs if "scored" in entry}
    if len(scored) > 1:
        print_note("note: these runs were validated on different texts, so their bits per byte are not comparable")
    is_running = result is None and not (run_dir / "result.json").is_file()
    result = result or read_result(run_dir, entries)
    name = run_dir.resolve().name
    rows = table_rows(description, entries, result)
    title = f"{name}: {next(iter(rows.values()), '')}"
    parts = [f"# {name}\n"]
    if is_running:
        parts.append(f"Still running: the metrics are from step {result['steps']:,}.\n")

    evaluations = [entry for entry in entries if "greedy" in entry]
    if evaluations:
        parts.append(score_table(evaluations[0], evaluations[-1]))
        title = f"{name}: {rows['task']}"
    parts.append(table("| | |", "| --- | --- |", rows.items()))
    with contextlib.suppress(ImportError):  # matplotlib may be missing
        if entries:
            plot_curves(entries, title, references).savefig(run_dir / "curve.png", dpi=120)
            parts.append("![curve](curve.png)\n")
    if evaluations:
        answers = [entry for entry in entries if "answers" in entry]
        parts += ["## Greedy answers to held-out questions\n", answer_table(answers[0], answers[-1])]

    said = []
    command = description.get("command")
    if with_samples and command in ("pretrain", "finetune"):
        texts, heading = samples(run_dir, command, device, live)
        said = [f"--- sample\n{sample}" for sample in texts] or [heading]
        parts.append(f"{heading}\n")
        parts += [f"````text\n{sample}\n````\n" for sample in texts]  # a sample may hold ``` itself
    (run_dir / "report.md").write_text("\n".join(parts), encoding="utf-8")
    # Printed last, because whoever reads the output, such as head, may have ended.
    print("\n".join([*said, f"--- report: {run_dir}/report.md"]), flush=True)
