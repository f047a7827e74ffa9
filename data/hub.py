"""Whole dataset and run directories from and to Hugging Face, every file checked by its sha256.

    python data/hub.py download OWNER/NAME --out data/shards/NAME
    python data/hub.py upload data/shards/NAME OWNER/NAME
    python data/hub.py download-run OWNER/NAME --out out/NAME
    python data/hub.py upload-run out/NAME OWNER/NAME

A dataset lists its files in dataset.json. For a run, which becomes a model repository, upload-run writes run.json: the
script, config.json, the log, the report, the tokenizer and the newest whole checkpoint. Its config.json names folders
of the machine that trained.

HF_ENDPOINT chooses another server and HF_TOKEN logs in, as everywhere in huggingface_hub. A server that says nothing
for HF_HUB_DOWNLOAD_TIMEOUT seconds (10) is asked again.
"""

import argparse
import contextlib
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from format import (
    FULL_DISK,
    SHA256,
    check_dataset,
    entry_of,
    fail,
    lock_folder,
    read_dataset,
    read_json,
    run,
    sha256_file,
    write_json,
)
from tqdm import tqdm

ATTEMPTS = 5
FILES_PER_COMMIT = 20
RUN_FORMAT = "decoderstack-run-1"
CHECKPOINT = (
    "state.json",
    "model.safetensors",
    "optimizer_1.safetensors",
    "optimizer_2.safetensors",
)
NEEDED = ("config.json", "log.jsonl", "tokenizer.json")
# What a run may consist of, in the hub and on the disk.
RUN_FILE = re.compile(
    r"train_[a-z0-9_]{1,40}\.py|config\.json|log\.jsonl|tokenizer\.json|report\.md|result\.json"
    r"|(curve|reward)\.png|(core|chat_eval)\.csv"
    r"|checkpoints/step_[0-9]{6,18}/(state\.json|(model|optimizer_[12])\.safetensors)"
)
OF_THE_HUB = (".gitattributes", "README.md", "run.json")
answered = False  # a request has succeeded, so there is a network


def redact(text: object) -> str:
    """One line of an error, without the token and without signed parts of URLs."""
    line = " ".join(str(text).split())
    line = re.sub(r"(https?://[^\s?]+)\?\S+", r"\1", line)
    line = re.sub(r"hf_[A-Za-z0-9]{4,}", "hf_...", line)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if os.environ.get(name):
            line = line.replace(os.environ[name], "...")
    return line[:300]


def redact_record(record: logging.LogRecord) -> bool:
    """A filter of the log that changes lines and drops none."""
    record.msg, record.args = redact(record.getMessage()), ()
    return True


def limit_time(request: Any) -> None:
    """Gives a request the time limits that it does not have."""
    from huggingface_hub.constants import HF_HUB_DOWNLOAD_TIMEOUT

    # The server may need long to take in a commit.
    seconds = HF_HUB_DOWNLOAD_TIMEOUT * (1 if request.method in ("GET", "HEAD") else 30)
    limits = request.extensions.get("timeout", {})
    stated = {kind: limit for kind, limit in limits.items() if limit is not None}
    every = dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    request.extensions["timeout"] = every | stated


def check_headers(response: Any) -> None:
    """Ends the script if a header that becomes the name of a file points out of the cache."""
    for header in ("ETag", "X-Linked-Etag", "X-Repo-Commit"):
        name = response.headers.get(header, "").removeprefix("W/").strip('"')
        if name and not is_inside(name):
            fail(f"{response.url.host} sent a bad {header}: {name[:60]!r}; check HF_ENDPOINT")


def prepare() -> None:
    """Does what huggingface_hub leaves open: its log lines name whole URLs, some of its requests have no time limit,
    and an ETag becomes the name of a file unchecked."""
    import huggingface_hub

    for handler in logging.getLogger("huggingface_hub").handlers:
        if redact_record not in handler.filters:
            handler.addFilter(redact_record)
    client = huggingface_hub.get_session()
    hooks = client.event_hooks
    if limit_time not in hooks["request"]:
        client.event_hooks = {
            "request": [*hooks["request"], limit_time],
            "response": [*hooks["response"], check_headers],
        }


def is_inside(name: str) -> bool:
    """False for the name of a file that would lie outside the folder it is put into, or that no disk takes."""
    parts = name.split("/")
    usable = all(
        part not in ("", ".", "..") and len(part.encode("utf-8", "replace")) < 256 for part in parts
    )
    return usable and not any(c in name for c in "\\\0")


def is_unreachable(problem: BaseException | None) -> bool:
    """Whether an error came about because no connection could be made."""
    while problem is not None:
        if isinstance(problem, ConnectionRefusedError | socket.gaierror):
            return True
        problem = problem.__cause__ or problem.__context__
    return False


def retry(
    action: Callable[[], Any], what: str, attempts: int = ATTEMPTS, backoff: float = 1.0
) -> Any:
    """Calls action until it succeeds, waiting backoff * 1, 2, 4, ... seconds between failures.

    What no repetition can cure (no such repository, file or permission) ends the script at once, and
    so does a server that cannot be reached, unless it has answered before.
    """
    global answered
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    for attempt in range(attempts):
        try:
            found = action()
            answered = True
            return found
        except (
            Exception
        ) as problem:  # many kinds, of several libraries: connection, time-out, size, server
            gone = isinstance(
                problem, RepositoryNotFoundError | RevisionNotFoundError | EntryNotFoundError
            )
            if gone and not isinstance(
                problem, LocalEntryNotFoundError
            ):  # that one: not here, and no network
                fail(
                    f"{what}: not found ({redact(problem)}); check the names, and HF_TOKEN if it is private"
                )
            if isinstance(problem, OSError) and problem.errno in FULL_DISK:
                fail(f"{what}: the disk is full ({redact(problem)}); free some space and run again")
            if is_offline_mode():
                fail(f"{what}: it is not in the cache and HF_HUB_OFFLINE is set; unset it")
            if is_unreachable(problem) and not answered:
                fail(
                    f"{what}: the server cannot be reached ({redact(problem)}); check the network and HF_ENDPOINT"
                )
            status = getattr(getattr(problem, "response", None), "status_code", None)
            if isinstance(problem, HfHubHTTPError) and status in (400, 401, 403):
                fail(
                    f"{what}: refused with status {status} ({redact(problem)}); check HF_TOKEN and its "
                    f"permissions"
                )
            reason = redact(f"{type(problem).__name__}: {problem}")
            if attempt + 1 == attempts:
                times = f"failed {attempts} times, last with" if attempts > 1 else "failed with"
                fail(f"{what}: {times} {reason}; check the network and HF_ENDPOINT")
            delay = backoff * 2**attempt
            tqdm.write(f"{what}: {reason}; trying again in {delay:g} s")
            time.sleep(delay)


def fetch(repo: str, name: str, commit: str | None = None) -> Path:
    """A file of a dataset repository in the Hugging Face cache, of a commit or of what main is now."""
    from huggingface_hub import hf_hub_download

    prepare()
    return Path(
        retry(
            lambda: hf_hub_download(repo, name, repo_type="dataset", revision=commit),
            f"fetching {name} of {repo}",
        )
    )


def list_files(repo: str) -> tuple[str, dict[str, list]]:
    """(commit of main, {name: [size, digest]}) of a dataset repository: sha256 of large files, git's hash of others."""
    from huggingface_hub import HfApi

    # The list itself takes one attempt, as huggingface_hub repeats that request five times. It would
    # do so for half a minute where there is no network, so another request comes first.
    commit = find_commit(Repo(repo, "dataset"), "main")
    tree = retry(
        lambda: list(
            HfApi().list_repo_tree(repo, repo_type="dataset", revision=commit, recursive=True)
        ),
        f"listing {repo}",
        attempts=1,
    )
    blobs = [entry for entry in tree if hasattr(entry, "size")]  # the others are folders
    digests = [entry.lfs.sha256 if entry.lfs else entry.blob_id for entry in blobs]
    return commit, {
        entry.path: [entry.size, digest] for entry, digest in zip(blobs, digests, strict=True)
    }


class Repo(NamedTuple):
    """A repository of the hub, and how often each request to it and each of its files is tried."""

    name: str
    type: str  # "dataset" or "model"
    attempts: int = ATTEMPTS
    backoff: float = 1.0

    def call(self, action: Callable[[], Any], what: str) -> Any:
        return retry(action, what, self.attempts, self.backoff)


def is_right(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_file(path) == sha256


def find_commit(repo: Repo, revision: str) -> str:
    """The commit that a revision is now: one for all files, even if someone uploads meanwhile."""
    from huggingface_hub import HfApi

    prepare()
    what = f"opening {repo.name} at {revision}"
    info = repo.call(
        lambda: HfApi().repo_info(repo.name, repo_type=repo.type, revision=revision), what
    )
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        fail(f"{what}: the server names the commit {str(info.sha)[:60]!r}; check HF_ENDPOINT")
    return info.sha


def get_file(repo: Repo, commit: str, name: str, out: Path, force: bool) -> Path:
    """A file of the repository in OUT/.download."""
    from huggingface_hub import hf_hub_download

    action = lambda: hf_hub_download(  # noqa: E731
        repo.name,
        name,
        repo_type=repo.type,
        revision=commit,
        local_dir=out / ".download",
        force_download=force,
    )
    return Path(repo.call(action, f"fetching {name} of {repo.name}"))


def get_files(repo: Repo, commit: str, files: dict[str, dict], out: Path, manifest: Path) -> None:
    """Fetches what a manifest lists, in its order. Files land in OUT/.download and move to their name once their
    sha256 is right; the manifest moves last. A second run skips what is right and continues what was interrupted."""
    skipped = 0
    for name, entry in tqdm(files.items(), desc="files", disable=None):
        if is_right(out / name, entry["sha256"]):
            skipped += 1
            continue
        for attempt in range(repo.attempts):
            path = get_file(repo, commit, name, out, force=attempt > 0)
            found = sha256_file(path)
            if found == entry["sha256"]:
                break
            path.unlink()
            tqdm.write(f"{name}: sha256 {found}, expected {entry['sha256']}; deleted")
        else:
            fail(
                f"{name} of {repo.name} is damaged: expected sha256 {entry['sha256']}, found {found} in "
                f"{repo.attempts} attempts; "
                "ask its owner to upload it again"
            )
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, out / name)
    os.replace(manifest, out / manifest.name)
    shutil.rmtree(out / ".download")
    print(f"{out} is complete: {len(files)} files, {skipped} were there already, commit {commit}")


def list_hashes(repo: Repo) -> dict[str, str]:
    """The files of a repository, with the sha256 of each that the hub stores by it, else ""."""
    from huggingface_hub import HfApi

    tree = retry(
        lambda: list(HfApi().list_repo_tree(repo.name, repo_type=repo.type, recursive=True)),
        f"listing {repo.name}",
        attempts=1,
    )
    blobs = [entry for entry in tree if hasattr(entry, "size")]  # the others are folders
    return {entry.path: entry.lfs.sha256 if entry.lfs else "" for entry in blobs}


def send_files(
    repo: Repo, folder: Path, files: dict[str, dict], manifest: Path, there: dict[str, str]
) -> None:
    """Sends the files that the repository lacks; the manifest goes last, so that what is half-uploaded cannot be
    downloaded by mistake."""
    from huggingface_hub import CommitOperationAdd, HfApi

    names = [name for name, entry in files.items() if there.get(name) != entry["sha256"]]
    paths = {name: folder / name for name in names} | {manifest.name: manifest}
    groups = [names[i : i + FILES_PER_COMMIT] for i in range(0, len(names), FILES_PER_COMMIT)]
    for group in [*groups, [manifest.name]]:

        def commit(group: list[str] = group) -> None:
            # Made anew at each attempt: huggingface_hub marks operations that it has sent.
            operations = [CommitOperationAdd(name, paths[name]) for name in group]
            message = f"Add {len(group)} files"
            HfApi().create_commit(
                repo.name, operations, commit_message=message, repo_type=repo.type
            )

        repo.call(commit, f"uploading {group[0]} to {repo.name}")
    print(
        f"{repo.name} is complete: {len(names)} files sent, {len(files) - len(names)} were there already"
    )


def create_repo(repo: Repo, private: bool) -> None:
    from huggingface_hub import HfApi

    repo.call(
        lambda: HfApi().create_repo(repo.name, repo_type=repo.type, private=private, exist_ok=True),
        f"creating {repo.name}",
    )


# --- datasets ---------------------------------------------------------------------------------------------


def download(repo: Repo, out: Path, revision: str = "main") -> None:
    """Fetches a dataset."""
    commit = find_commit(repo, revision)
    new = get_file(repo, commit, "dataset.json", out, force=True)
    dataset = check_dataset(read_json(new), f"dataset.json of {repo.name}")
    if (out / "dataset.json").exists():
        old = read_dataset(out)
        if old["fingerprint"] != dataset["fingerprint"]:
            fail(
                f"{out} holds another dataset (fingerprint {old['fingerprint'][:12]}, {repo.name} has "
                f"{dataset['fingerprint'][:12]}); choose another --out"
            )
    elif (out / "progress.json").exists():
        fail(f"{out} holds a dataset that data/pretrain.py has begun; choose another --out")
    get_files(repo, commit, dataset["files"], out, new)


def upload(folder: Path, repo: Repo, private: bool = False) -> None:
    """Sends a dataset: the files that dataset.json lists. Nothing is sent unless every file is right."""
    prepare()
    dataset = read_dataset(folder)
    for name, entry in tqdm(dataset["files"].items(), desc="checking", disable=None):
        if not (folder / name).is_file():
            fail(
                f"{folder / name} is missing but dataset.json lists it; build the dataset again before "
                f"uploading"
            )
        found = sha256_file(folder / name)
        if found != entry["sha256"]:
            fail(
                f"{folder / name} is damaged: expected sha256 {entry['sha256']}, found {found}; build it "
                f"again"
            )
    create_repo(repo, private)
    send_files(repo, folder, dataset["files"], folder / "dataset.json", list_hashes(repo))


# --- run directories --------------------------------------------------------------------------------------


def check_run(value: Any, path: str) -> dict[str, dict]:
    """The files that a run.json lists, config.json first; ends the script unless they make up a run and lie in it."""
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if found != RUN_FORMAT:
        fail(f"{path} has format {found!r}, expected {RUN_FORMAT!r}; upload the run again")
    files = value.get("files")
    names = sorted(files) if isinstance(files, dict) else []
    for name in names:
        if not RUN_FILE.fullmatch(name):
            fail(f"{path} lists {name[:200]!r}, which is no file of a run; upload the run again")
        sha256 = files[name].get("sha256") if isinstance(files[name], dict) else None
        if not isinstance(sha256, str) or not SHA256.fullmatch(sha256):
            fail(f"{path} lists {name} without its sha256; upload the run again")

    scripts = [name for name in names if name.endswith(".py")]
    folders = {name.rsplit("/", 1)[0] for name in names if "/" in name}
    needed = [*NEEDED, *(f"{folder}/{name}" for folder in folders for name in CHECKPOINT[:2])]
    if len(scripts) != 1 or len(folders) != 1 or not set(needed).issubset(names):
        fail(
            f"{path} must list one script train_*.py, {', '.join(NEEDED)} and one checkpoint, but lists "
            f"{', '.join(names) or 'nothing'}; only whole runs of such a script can be shared"
        )
    return {name: files[name] for name in sorted(names, key=lambda name: name != "config.json")}


def newest_checkpoint(run_dir: Path) -> dict[str, dict]:
    """The entries of the newest checkpoint whose files are those that its state.json lists."""
    folders = [
        path for path in run_dir.glob("checkpoints/step_*") if (path / "state.json").is_file()
    ]
    folders = [
        path for path in folders if RUN_FILE.fullmatch(f"checkpoints/{path.name}/state.json")
    ]
    for folder in sorted(folders, key=lambda path: int(path.name[5:]), reverse=True):
        entries = list_entries(
            run_dir, [f"checkpoints/{folder.name}/{name}" for name in CHECKPOINT]
        )
        state = read_json(folder / "state.json")
        listed = state.get("files") if isinstance(state, dict) else None
        found = {Path(name).name: entry["sha256"] for name, entry in entries.items()}
        if found.pop("state.json") and found == listed:
            return entries
        print(f"passed over {folder}: its files are not those that its state.json lists")
    fail(f"{run_dir} has no whole checkpoint; train until one is saved, or restore one")


def list_entries(folder: Path, names: Iterable[str]) -> dict[str, dict]:
    """What a run.json says of those files that exist."""
    names = [name for name in names if (folder / name).is_file()]
    return {name: entry_of(folder / name, sha256_file(folder / name)) for name in names}


def upload_run(run_dir: Path, repo: Repo, private: bool = False) -> None:
    """Sends a run: what is in its folder and RUN_FILE names, with the newest whole checkpoint alone."""
    prepare()
    names = sorted(path.name for path in run_dir.iterdir() if RUN_FILE.fullmatch(path.name))
    files = {**list_entries(run_dir, names), **newest_checkpoint(run_dir)}
    manifest = {"format": RUN_FORMAT, "files": files}
    check_run(manifest, f"run.json of {run_dir}")
    create_repo(repo, private)
    there = list_hashes(repo)
    others = [name for name in there if not RUN_FILE.fullmatch(name) and name not in OF_THE_HUB]
    if others:
        fail(f"{repo.name} holds {others[0]}, which is no file of a run; choose another repository")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        write_json(path, manifest)
        send_files(repo, run_dir, files, path, there)


def download_run(repo: Repo, out: Path, revision: str = "main") -> None:
    """Fetches a run. config.json comes first: it tells a folder that holds the beginning of this run from others."""
    commit = find_commit(repo, revision)
    new = get_file(repo, commit, "run.json", out, force=True)
    files = check_run(read_json(new), f"run.json of {repo.name}")
    visible = [path for path in out.iterdir() if not path.name.startswith(".")]
    if visible and not is_right(out / "config.json", files["config.json"]["sha256"]):
        fail(f"{out} holds something else than this run; choose another --out")
    get_files(repo, commit, files, out, new)
    script = next(name for name in files if name.endswith(".py"))
    print(f"the tools in runs/ execute {out / script}: read it first, unless you trust {repo.name}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Download and upload datasets and runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for suffix, what in (("", "dataset"), ("-run", "run")):
        p = commands.add_parser(f"download{suffix}", help=f"fetch a {what} directory")
        p.add_argument("repo", metavar="REPO", help="OWNER/NAME on Hugging Face")
        p.add_argument("--out", required=True, type=Path)
        p.add_argument("--revision", default="main")
        p = commands.add_parser(f"upload{suffix}", help=f"send a {what} directory")
        p.add_argument("folder", metavar="DIR", type=Path)
        p.add_argument("repo", metavar="REPO", help="OWNER/NAME, made if it does not exist")
        p.add_argument("--private", action="store_true")
    for p in commands.choices.values():
        p.add_argument(
            "--attempts", type=int, default=ATTEMPTS, help="tries for each request and each file"
        )
        p.add_argument(
            "--backoff",
            type=float,
            default=1.0,
            help="seconds before the second try; doubles each time",
        )
    args = parser.parse_args()
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", args.repo):
        fail(f"{args.repo!r} is not a repository name; give OWNER/NAME")
    if args.attempts < 1 or args.backoff < 0:
        fail(
            f"--attempts {args.attempts} --backoff {args.backoff:g} is out of range; give at least 1 and 0"
        )
    is_run = args.command.endswith("-run")
    repo = Repo(args.repo, "model" if is_run else "dataset", args.attempts, args.backoff)
    if args.command == "upload-run" and not (args.folder / "config.json").is_file():
        fail(f"{args.folder} is no run directory: it has no config.json; check the path")
    with contextlib.suppress(BrokenPipeError):
        if args.command == "upload":
            upload(args.folder, repo, args.private)
            return
        # Training holds the same lock of its run directory.
        with lock_folder(args.folder if args.command == "upload-run" else args.out):
            if args.command == "upload-run":
                upload_run(args.folder, repo, args.private)
            elif is_run:
                download_run(repo, args.out, args.revision)
            else:
                download(repo, args.out, args.revision)


if __name__ == "__main__":
    run(main)
