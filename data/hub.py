"""Whole dataset directories from and to Hugging Face, every file checked against dataset.json.

    python data/hub.py download OWNER/NAME --out data/shards/NAME
    python data/hub.py upload data/shards/NAME OWNER/NAME

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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from format import (
    FULL_DISK,
    check_dataset,
    fail,
    lock_folder,
    read_dataset,
    read_json,
    run,
    sha256_file,
)
from tqdm import tqdm

ATTEMPTS = 5
FILES_PER_COMMIT = 20
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
                    f"{what}: the server cannot be reached ({redact(problem)}); check the network and "
                    f"HF_ENDPOINT (data/pretrain.py --source stdlib needs neither)"
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


def fetch(repo: str, name: str) -> Path:
    """A file of a dataset repository in the Hugging Face cache."""
    from huggingface_hub import hf_hub_download

    prepare()
    return Path(
        retry(
            lambda: hf_hub_download(repo, name, repo_type="dataset"), f"fetching {name} of {repo}"
        )
    )


def list_files(repo: str) -> list[str]:
    """The names of all files of a dataset repository."""
    from huggingface_hub import HfApi

    prepare()
    # The list itself takes one attempt, as huggingface_hub repeats that request five times. It would
    # do so for half a minute where there is no network, so another request comes first.
    retry(lambda: HfApi().dataset_info(repo), f"opening {repo}")
    return retry(
        lambda: HfApi().list_repo_files(repo, repo_type="dataset"), f"listing {repo}", attempts=1
    )


def is_right(path: Path, sha256: str) -> bool:
    return path.is_file() and sha256_file(path) == sha256


def download(
    repo: str, out: Path, revision: str = "main", attempts: int = ATTEMPTS, backoff: float = 1.0
) -> None:
    """Fetches a dataset. Files land in OUT/.download and move to their name once their sha256 is right;
    dataset.json moves last. A second run skips what is right and continues what was interrupted."""
    from huggingface_hub import HfApi, hf_hub_download

    prepare()
    what = f"opening {repo} at {revision}"
    # One commit for all files, even if someone uploads meanwhile.
    commit = retry(
        lambda: HfApi().dataset_info(repo, revision=revision).sha, what, attempts, backoff
    )
    staging = out / ".download"

    if not re.fullmatch("[0-9a-f]{40}", str(commit)):
        fail(f"{what}: the server names the commit {str(commit)[:60]!r}; check HF_ENDPOINT")

    def get(name: str, force: bool) -> Path:
        action = lambda: hf_hub_download(  # noqa: E731
            repo,
            name,
            repo_type="dataset",
            revision=commit,
            local_dir=staging,
            force_download=force,
        )
        return Path(retry(action, f"fetching {name} of {repo}", attempts, backoff))

    new = get("dataset.json", True)
    dataset = check_dataset(read_json(new), f"dataset.json of {repo}")
    if (out / "dataset.json").exists():
        old = read_dataset(out)
        if old["fingerprint"] != dataset["fingerprint"]:
            fail(
                f"{out} holds another dataset (fingerprint {old['fingerprint'][:12]}, {repo} has "
                f"{dataset['fingerprint'][:12]}); choose another --out"
            )
    elif (out / "progress.json").exists():
        fail(f"{out} holds a dataset that data/pretrain.py has begun; choose another --out")
    skipped = 0
    for name, entry in tqdm(dataset["files"].items(), desc="files", disable=None):
        if is_right(out / name, entry["sha256"]):
            skipped += 1
            continue
        for attempt in range(attempts):
            path = get(name, force=attempt > 0)
            found = sha256_file(path)
            if found == entry["sha256"]:
                break
            path.unlink()
            tqdm.write(f"{name}: sha256 {found}, expected {entry['sha256']}; deleted")
        else:
            fail(
                f"{name} of {repo} is damaged: expected sha256 {entry['sha256']}, found {found} in "
                f"{attempts} attempts; "
                "ask its owner to upload it again"
            )
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, out / name)
    os.replace(new, out / "dataset.json")
    shutil.rmtree(staging)
    print(
        f"{out} is complete: {len(dataset['files'])} files, {skipped} were there already, commit {commit}"
    )


def upload(
    folder: Path, repo: str, private: bool = False, attempts: int = ATTEMPTS, backoff: float = 1.0
) -> None:
    """Sends the files that dataset.json lists and that the repository lacks; dataset.json goes last, so a
    half-uploaded dataset cannot be downloaded by mistake. Nothing is sent unless every file is right."""
    from huggingface_hub import CommitOperationAdd, HfApi

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
    api = HfApi()
    retry(
        lambda: api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True),
        f"creating {repo}",
        attempts,
        backoff,
    )
    tree = retry(
        lambda: list(api.list_repo_tree(repo, repo_type="dataset", recursive=True)),
        f"listing {repo}",
        attempts=1,
    )
    there = {entry.path: entry.lfs.sha256 for entry in tree if getattr(entry, "lfs", None)}
    names = [name for name, entry in dataset["files"].items() if there.get(name) != entry["sha256"]]
    groups = [names[i : i + FILES_PER_COMMIT] for i in range(0, len(names), FILES_PER_COMMIT)] + [
        ["dataset.json"]
    ]
    for group in groups:

        def commit(group: list[str] = group) -> None:
            # Made anew at each attempt: huggingface_hub marks operations that it has sent.
            operations = [CommitOperationAdd(name, folder / name) for name in group]
            api.create_commit(
                repo, operations, commit_message=f"Add {len(group)} files", repo_type="dataset"
            )

        retry(commit, f"uploading {group[0]} to {repo}", attempts, backoff)
    print(
        f"{repo} is complete: {len(names)} files sent, {len(dataset['files']) - len(names)} were there "
        f"already"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Download and upload dataset directories.")
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("download", help="fetch a dataset directory")
    p.add_argument("repo", metavar="REPO", help="OWNER/NAME of a Hugging Face dataset")
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--revision", default="main")
    p = commands.add_parser("upload", help="send a dataset directory")
    p.add_argument("folder", metavar="DIR", type=Path)
    p.add_argument(
        "repo",
        metavar="REPO",
        help="OWNER/NAME of a Hugging Face dataset, made if it does not exist",
    )
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
    with contextlib.suppress(BrokenPipeError):
        if args.command == "download":
            with lock_folder(args.out):
                download(args.repo, args.out, args.revision, args.attempts, args.backoff)
        else:
            upload(args.folder, args.repo, args.private, args.attempts, args.backoff)


if __name__ == "__main__":
    run(main)
