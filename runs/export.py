"""A trained model or encoder as a Hugging Face repository that transformers and tokenizers load.

    python runs/export.py out/RUN --out export/my-model
    AutoModelForCausalLM.from_pretrained("export/my-model", trust_remote_code=True)   # then, in Python
    python runs/export.py out/RUN --gguf my-model.gguf [--type q8_0]        for llama.cpp, ollama, LM Studio
    python runs/export.py FOLDER --gguf my-model.gguf       for an export of runs/portable.args, finetuned elsewhere
    python runs/export.py out/embed --out export/embed      an encoder, for sentence-transformers

The folder holds model.safetensors, config.json, generation_config.json, tokenizer.json, tokenizer_config.json with the
chat template, the model's code (export_model.py, whose logits equal the script's) and README.md with results and
commands. `hf upload OWNER/NAME export/my-model` sends it to the hub. A run of runs/portable.args becomes a
Qwen3ForCausalLM, which needs no code of its own; only such a run can become a GGUF file. An encoder becomes a EuroBERT
with the mask as an additional token. Its embeddings are equal, except for texts that spell a special token such as
<|bos|>: transformers takes that for the token, this project for text.

This executes the training script in the run directory.
"""

import argparse
import csv
import json
import shutil
import sys
from pathlib import Path

from lib.command import RunError, run_command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Export a run for transformers, sentence-transformers or llama.cpp.")
    add = parser.add_argument
    add("run_dir", metavar="RUN", type=Path, help="run directory, or for --gguf a finetuned portable export")
    add("--out", type=Path, metavar="DIR", help="folder to write, for transformers")
    add("--gguf", type=Path, metavar="FILE", help="file to write, for llama.cpp")
    add("--type", choices=("f32", "f16", "q8_0"), default="f16", help="dtype of weights in --gguf (default f16)")
    add("--step", type=int, metavar="N", help="step of the checkpoint to export (default: the newest)")
    dtypes = ("float32", "bfloat16", "float16")
    add("--dtype", choices=dtypes, default="float32", help="dtype of weights in --out (default float32)")
    add("--name", metavar="NAME", help="model name in the card, e.g. OWNER/NAME (default: the folder's)")
    add("--license", metavar="NAME", help="license in the model card, as the hub spells it, e.g. mit")
    add("--language", default="en", metavar="CODE", help="language in the model card (default: en)")
    args = parser.parse_args(argv)
    if not (args.out or args.gguf):
        parser.error("pass --out DIR, --gguf FILE, or both")
    own_name = args.out.resolve().name if args.out else args.gguf.name.removesuffix(".gguf")
    args.path = args.name or from_here(args.out or args.gguf, own_name)
    args.name = args.name or own_name
    return args


def from_here(path: Path, otherwise: str) -> str:
    """A path relative to this folder, for commands; `otherwise` if it lies elsewhere, as cards name no local paths."""
    path = path.resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else otherwise


if __name__ == "__main__":
    parse()  # --help and wrong flags need not wait for PyTorch

import torch
from engine import Run, load_run
from jinja2 import StrictUndefined, Template
from lib import export_portable, report
from lib.chat_format import is_chat_run
from lib.export_files import make_folder, store_weights, write_json, write_tokenizer
from lib.export_tokenizer import read_vocabulary
from lib.export_weights import convert_weights, describe_model

LIB = Path(__file__).with_name("lib")

# ---- model card


def training_data(dataset: Path, is_chat: bool) -> str:
    """Names of the sources of a dataset, if it is still on this computer."""
    path = dataset / "dataset.json"
    if not path.is_file():
        return "not stated; the dataset was missing when the model was exported"
    description = json.loads(path.read_text(encoding="utf-8"))
    sources = description["sources"]
    if is_chat:
        sources += description.get("sft", {}).get("sources", [])
    return ", ".join(sources)


def model_card(args: argparse.Namespace, fields: dict, parameters: int, step: int, bos: str) -> str:
    """README.md of the repository; args are those of the command line."""
    run_dir = args.run_dir
    log = report.read_log(run_dir)
    entries = [entry for entry in log if entry["step"] <= step]
    is_newest = len(entries) == len(log)
    result = report.read_result(run_dir, entries) if is_newest else report.latest(entries)
    description = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    rows = report.table_rows(description, entries, result)
    rows.pop("data", None)  # a path on the computer that trained the model
    core = []
    if is_newest and (run_dir / "core.csv").is_file():
        header, *tasks = csv.reader((run_dir / "core.csv").read_text(encoding="utf-8").splitlines())
        core = [header, ["---"] * len(header), *tasks]
    is_chat = is_chat_run(run_dir)

    text = (LIB / "export_card.md").read_text(encoding="utf-8")
    options = {"trim_blocks": True, "keep_trailing_newline": True, "undefined": StrictUndefined}
    return Template(text, **options).render(
        **vars(args) | {"run_dir": from_here(run_dir, f"out/{run_dir.resolve().name}")},
        fields=fields,
        millions=parameters / 1e6,
        bos=bos,
        is_own="auto_map" in fields,
        is_chat=is_chat,
        data=training_data(Path(description["config"]["data"]), is_chat),
        rows=rows,
        scored=report.latest(entries).get("scored"),
        core=core,
        has_figure=is_newest and (run_dir / "curve.png").is_file(),
        run=run_dir.resolve().name,
    )


# ---- the repository


def convert(run: Run, run_dir: Path, for_llama_cpp: bool) -> tuple[dict, dict[str, torch.Tensor]]:
    """The fields of config.json and the weights. Raises: RunError for a shape that no export has"""
    model = run.model
    c = model.config
    reason = export_portable.why_not_portable(model)
    if not reason:
        return export_portable.qwen_config(c), export_portable.qwen_weights(model)
    advice = export_portable.HOW_TO_TRAIN
    if for_llama_cpp:
        raise RunError(f"llama.cpp does not support the architecture of {run_dir} ({reason}); {advice}")
    if c.swiglu or c.rotary_full or not c.softcap:
        raise RunError(f"{run_dir} is only partly portable ({reason}); {advice}")
    return describe_model(model), convert_weights(run.script, model)


def write_folder(args, fields: dict, tensors: dict, vocabulary, card: str) -> None:
    """Writes the repository, weights last, so that an unfinished folder does not load."""
    bos, end, pad = (vocabulary.specials[text] for text in (vocabulary.bos, vocabulary.end, vocabulary.pad))
    ids = {"bos_token_id": bos, "eos_token_id": sorted({bos, end}), "pad_token_id": pad}
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50}
    make_folder(args.out)
    (args.out / "README.md").write_text(card, encoding="utf-8")
    if "(curve.png)" in card:
        shutil.copyfile(args.run_dir / "curve.png", args.out / "curve.png")
    if "auto_map" in fields:
        shutil.copyfile(LIB / "export_model.py", args.out / "modeling_decoderstack.py")
    write_json(args.out / "config.json", {**fields, **ids, "dtype": args.dtype})
    write_json(args.out / "generation_config.json", {**ids, **sampling})
    write_tokenizer(args.out, vocabulary, fields["max_position_embeddings"], padding_side="left")
    store_weights(args.out / "model.safetensors", tensors, getattr(torch, args.dtype))


# ---- the command


def classify(folder: Path) -> str:
    """What a folder holds: an "export" of this command, an "encoder" run, or a "run" of anything else."""
    is_checkpoint = (folder / "state.json").is_file()
    if any(folder.glob("*.safetensors")) and not is_checkpoint:
        return "export"
    config = folder / "config.json"
    if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("command", "").endswith("_encoder"):
        return "encoder"
    return "run"


def export_run(args: argparse.Namespace) -> None:
    """Writes a run as a repository, a GGUF file, or both. Raises: RunError, OSError"""
    run = load_run(args.run_dir, args.step, "cpu", dtype="float32")
    fields, tensors = convert(run, args.run_dir, bool(args.gguf))
    is_chat = is_chat_run(args.run_dir)
    vocabulary = read_vocabulary(run.tokenizer, is_chat)
    parameters = sum(value.numel() for value in tensors.values() if value.dtype != torch.int8)

    if args.gguf:
        export_portable.write_gguf(args, fields, tensors, vocabulary)
    if args.out:
        card = model_card(args, fields, parameters, run.step, vocabulary.bos)
        write_folder(args, fields, tensors, vocabulary, card)
        size = sum(path.stat().st_size for path in args.out.iterdir()) / 1e6
        about = f"step {run.step}, {parameters / 1e6:.1f} M parameters, {size:.1f} MB"
        print(f"wrote {args.out}: {about}, {'chat' if is_chat else 'base'} model")


def export(args: argparse.Namespace) -> None:
    """Writes what the flags ask for. Raises: RunError, OSError"""
    kind = classify(args.run_dir)
    if kind == "run":
        export_run(args)
    elif kind == "encoder":
        if args.gguf:
            raise RunError(f"{args.run_dir} is an encoder, which --gguf cannot export; pass --out DIR")
        sys.path.append(str(Path(__file__).with_name("encoder")))
        from export_encoder import export_encoder

        export_encoder(args.run_dir, args.out)
    else:
        if args.out:
            raise RunError(f"{args.run_dir} is already an export; pass --gguf FILE without --out")
        export_portable.write_gguf(args, *export_portable.read_folder(args.run_dir))


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: export(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
