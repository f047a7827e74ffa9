"""Downloads and uploads dataset and run directories (Hugging Face), and checks every sha256.

    python data/hub.py download OWNER/NAME --out data/shards/NAME
    python data/hub.py upload data/shards/NAME OWNER/NAME
    python data/hub.py download-run OWNER/NAME --out out/NAME --trust
    python data/hub.py upload-run out/NAME OWNER/NAME

A dataset lists its files in dataset.json. For a run, which becomes a model repository, upload-run
writes run.json: the script, config.json, the log, the report, the tokenizer and the newest complete
checkpoint. Its config.json names folders of the machine that trained. The tools in runs/ execute
the script of a run, so download-run asks for --trust.

huggingface_hub does the transfers. HF_ENDPOINT chooses another server and HF_TOKEN logs in.
"""

import argparse
import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dataset import (
    check_dataset,
    check_file,
    check_format,
    fail,
    file_entry,
    json_bytes,
    lock_folder,
    read_dataset,
    read_json,
    run,
    sha256_file,
    sha256_matches,
    write_atomic,
)
from tqdm import tqdm

SECONDS = 10  # without an answer, there counts as no network
RUN_FORMAT = "decoderstack-run-1"
CHECKPOINT = ("state.json", "model.safetensors", "optimizer.safetensors")
NEEDED = ("config.json", "log.jsonl", "tokenizer.json")
# What a run may consist of, in the hub and on the disk.
RUN_FILE = re.compile(
    r"train_[a-z0-9_]{1,40}\.py|config\.json|log\.jsonl|tokenizer\.json|report\.md|result\.json"
    r"|(curve|reward)\.png|(core|chat_eval)\.csv"
    r"|checkpoints/step_[0-9]{6,18}/(state\.json|(model|optimizer)\.safetensors)"
)
OF_THE_HUB = (".gitattributes", "README.md", "run.json")


class Repo(NamedTuple):
    """A repository on Hugging Face."""

    name: str  # OWNER/NAME
    type: str  # "dataset" or "model"


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Ends the script with an error message if a call of huggingface_hub in the `with` fails."""
    try:
        yield
    except Exception as problem:  # of huggingface_hub, of its HTTP client or of the disk
        advice = "check the names, the network, HF_ENDPOINT, HF_TOKEN and the disk space, then run it again"
        fail(f"{what}: {type(problem).__name__}: {problem}; {advice}")


def reach_server() -> None:
    """Finds out within seconds whether there is a network; many requests of huggingface_hub wait for minutes."""
    import huggingface_hub
    from huggingface_hub.constants import ENDPOINT

    huggingface_hub.get_session().head(ENDPOINT, timeout=SECONDS)


def fetch(repo: str, name: str, commit: str | None = None, type: str = "dataset") -> Path:
    """Path in the Hugging Face cache of a repository's file, at a commit or at main."""
    from huggingface_hub import hf_hub_download

    with explained(f"fetching {name} of {repo}"):
        return Path(hf_hub_download(repo, name, repo_type=type, revision=commit))


def find_commit(repo: Repo, revision: str = "main") -> str:
    """The commit of a revision, so that all files are of one commit even if someone uploads meanwhile."""
    from huggingface_hub import HfApi

    with explained(f"opening {repo.name} at {revision}"):
        return HfApi().repo_info(repo.name, repo_type=repo.type, revision=revision, timeout=SECONDS).sha


def list_files(repo: str) -> tuple[str, dict[str, list]]:
    """(commit of main, {name: [size, digest]}) of a dataset repository: sha256 of large files, git's hash of others."""
    from huggingface_hub import HfApi

    commit = find_commit(Repo(repo, "dataset"))
    with explained(f"listing {repo}"):
        entries = list(HfApi().list_repo_tree(repo, repo_type="dataset", revision=commit, recursive=True))
    # Folders have no size.
    files = [entry for entry in entries if hasattr(entry, "size")]
    digests = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
    return commit, {file.path: [file.size, digests[file.path]] for file in files}


# ==== files that a manifest lists


def get_files(repo: Repo, commit: str, files: dict[str, dict], out: Path, manifest: Path) -> None:
    """Fetches what a manifest lists into OUT/.download, and moves each file to its name once its
    sha256 matches; the manifest comes last. A second run skips files that match and continues what
    was interrupted."""
    from huggingface_hub import snapshot_download

    checked = tqdm(files.items(), desc="checking", disable=None)
    missing = [name for name, entry in checked if not sha256_matches(out / name, entry["sha256"])]
    folder = out / ".download"
    options = {"repo_type": repo.type, "revision": commit, "allow_patterns": missing}
    if missing:
        with explained(f"fetching {len(missing)} files of {repo.name}"):
            snapshot_download(repo.name, local_dir=folder, **options)
    for name in missing:
        if not sha256_matches(folder / name, files[name]["sha256"]):
            (folder / name).unlink(missing_ok=True)
            hint = "run the same command again, and if that does not help, ask its owner to upload it again"
            listed = f"what {manifest.name} lists (sha256 {files[name]['sha256']})"
            fail(f"{name} of {repo.name} is not {listed}; {hint}")
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, out / name)
    shutil.rmtree(folder, ignore_errors=True)
    write_atomic(out / manifest.name, [manifest.read_bytes()])
    skipped = len(files) - len(missing)
    print(f"{out} is complete: {len(files)} files, {skipped} already there, commit {commit}")


def send_files(repo: Repo, folder: Path, names: Iterable[str], private: bool) -> None:
    """Sends files in one commit, so nobody can download half of them."""
    from huggingface_hub import HfApi

    api = HfApi()
    with explained(f"creating {repo.name}"):
        reach_server()
        api.create_repo(repo.name, repo_type=repo.type, private=private, exist_ok=True)
    content = {"folder_path": folder, "allow_patterns": list(names), "commit_message": "Add files"}
    with explained(f"uploading {folder} to {repo.name}"):
        api.upload_folder(repo_id=repo.name, repo_type=repo.type, **content)


# ==== datasets


def download(repo: Repo, out: Path, revision: str = "main") -> None:
    """Fetches a dataset."""
    commit = find_commit(repo, revision)
    manifest = fetch(repo.name, "dataset.json", commit)
    dataset = check_dataset(read_json(manifest), f"dataset.json of {repo.name}")
    if (out / "dataset.json").exists():
        old = read_dataset(out)["fingerprint"][:12]
        new = dataset["fingerprint"][:12]
        if old != new:
            fail(f"{out} holds another dataset (fingerprint {old}, {repo.name} has {new}); choose another --out")
    get_files(repo, commit, dataset["files"], out, manifest)


def upload(folder: Path, repo: Repo, private: bool = False) -> None:
    """Sends a dataset: the files that dataset.json lists, if every one matches it."""
    files = read_dataset(folder)["files"]
    for name, entry in tqdm(files.items(), desc="checking", disable=None):
        check_file(folder / name, entry)
    send_files(repo, folder, [*files, "dataset.json"], private)
    print(f"{repo.name} is complete: {len(files)} files")


# ==== run directories


def check_run(value: Any, path: str) -> dict[str, dict]:
    """The files that a run.json lists, config.json first; ends the script unless they make up a run and lie in it."""
    check_format(value, path, RUN_FORMAT, "upload the run again")
    files = value.get("files")
    if not isinstance(files, dict) or not all(isinstance(e, dict) and "sha256" in e for e in files.values()):
        fail(f"{path} does not list files and their sha256; upload the run again")
    names = sorted(files, key=lambda name: (name != "config.json", name))
    for name in names:
        if not RUN_FILE.fullmatch(name):
            fail(f"{path} lists {name!r}, which is not a file of a run; upload the run again")

    scripts = [name for name in names if name.endswith(".py")]
    folders = {name.rsplit("/", 1)[0] for name in names if "/" in name}
    needed = [*NEEDED, *(f"{folder}/{name}" for folder in folders for name in CHECKPOINT[:2])]
    if len(scripts) != 1 or len(folders) != 1 or not set(needed).issubset(names):
        found = f"must list one script train_*.py, {', '.join(NEEDED)} and one checkpoint, but lists {', '.join(names)}"
        fail(f"{path} {found}; only complete runs of such a script can be shared")
    return {name: files[name] for name in names}


def newest_checkpoint(run_dir: Path) -> dict[str, dict]:
    """The entries of the newest checkpoint whose files are those that its state.json lists."""
    states = [path.relative_to(run_dir) for path in run_dir.glob("checkpoints/*/state.json")]
    folders = [path.parent for path in states if RUN_FILE.fullmatch(path.as_posix())]
    for folder in sorted(folders, key=lambda path: int(path.name[5:]), reverse=True):
        entries = list_entries(run_dir, [(folder / name).as_posix() for name in CHECKPOINT])
        saved = read_json(run_dir / folder / "state.json")
        actual = {Path(name).name: entry["sha256"] for name, entry in entries.items()}
        del actual["state.json"]
        if isinstance(saved, dict) and saved.get("files") == actual:
            return entries
        print(f"skipped {folder}: its files do not match its state.json")
    fail(f"{run_dir} has no complete checkpoint; train until one is saved, or restore one")


def list_entries(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """What a run.json says of those files that exist."""
    names = [name for name in names if (folder / name).is_file()]
    return {name: file_entry(folder / name, sha256_file(folder / name)) for name in names}


def upload_run(run_dir: Path, repo: Repo, private: bool = False) -> None:
    """Sends a run: what RUN_FILE names, of the checkpoints only the newest complete one."""
    from huggingface_hub import HfApi

    names = sorted(path.name for path in run_dir.iterdir() if RUN_FILE.fullmatch(path.name))
    files = {**list_entries(run_dir, names), **newest_checkpoint(run_dir)}
    manifest = {"format": RUN_FORMAT, "files": files}
    check_run(manifest, f"run.json of {run_dir}")
    api = HfApi()
    with explained(f"opening {repo.name}"):
        reach_server()
        there = api.list_repo_files(repo.name) if api.repo_exists(repo.name) else []
    others = [name for name in there if not RUN_FILE.fullmatch(name) and name not in OF_THE_HUB]
    if others:
        fail(f"{repo.name} contains {others[0]}, which is not a file of a run; choose another repository")

    # The manifest goes last: what is half-uploaded has none, and cannot be downloaded by mistake.
    send_files(repo, run_dir, files, private)
    options = {"path_or_fileobj": json_bytes(manifest), "path_in_repo": "run.json"}
    with explained(f"uploading run.json to {repo.name}"):
        api.upload_file(repo_id=repo.name, **options)
    print(f"{repo.name} is complete: {len(files)} files")


def download_run(repo: Repo, out: Path, revision: str = "main", trust: bool = False) -> None:
    """Fetches a run. config.json comes first: it tells a folder that holds the beginning of this run from others."""
    from huggingface_hub.constants import ENDPOINT

    commit = find_commit(repo, revision)
    manifest = fetch(repo.name, "run.json", commit, repo.type)
    files = check_run(read_json(manifest), f"run.json of {repo.name}")
    script = next(name for name in files if name.endswith(".py"))
    if not trust:
        fail(
            f"{repo.name} contains {script}, a program that the tools in runs/ execute; read it at "
            f"{ENDPOINT}/{repo.name}/blob/{commit}/{script}, then add --revision {commit} --trust"
        )
    visible = [path for path in out.iterdir() if not path.name.startswith(".")]
    if visible and not sha256_matches(out / "config.json", files["config.json"]["sha256"]):
        fail(f"{out} contains something other than this run; choose another --out")
    get_files(repo, commit, files, out, manifest)


def main() -> None:
    parser = argparse.ArgumentParser(description="Download and upload datasets and runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for suffix, what in (("", "dataset"), ("-run", "run")):
        p = commands.add_parser(f"download{suffix}", help=f"fetch a {what} directory")
        p.add_argument("repo", metavar="REPO", help="OWNER/NAME on Hugging Face")
        p.add_argument("--out", required=True, type=Path, help="destination folder")
        p.add_argument("--revision", default="main", help="branch, tag or commit [%(default)s]")
        if what == "run":
            trust = "trust the run's script, which the tools in runs/ execute"
            p.add_argument("--trust", action="store_true", help=trust)
        p = commands.add_parser(f"upload{suffix}", help=f"send a {what} directory")
        p.add_argument("folder", metavar="DIR", type=Path, help=f"{what} directory")
        p.add_argument("repo", metavar="REPO", help="OWNER/NAME on Hugging Face, created if it does not exist")
        p.add_argument("--private", action="store_true", help="make a new repository private")
    args = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repo):
        fail(f"{args.repo!r} is not a repository name; give OWNER/NAME")
    repo = Repo(args.repo, "model" if args.command.endswith("-run") else "dataset")
    if args.command == "upload-run" and not (args.folder / "config.json").is_file():
        fail(f"{args.folder} is not a run directory: it has no config.json; check the path")
    if args.command == "upload":
        upload(args.folder, repo, args.private)
        return
    # Training holds the same lock of its run directory.
    with lock_folder(args.folder if args.command == "upload-run" else args.out):
        if args.command == "upload-run":
            upload_run(args.folder, repo, args.private)
        elif args.command == "download-run":
            download_run(repo, args.out, args.revision, args.trust)
        else:
            download(repo, args.out, args.revision)


if __name__ == "__main__":
    run(main)
