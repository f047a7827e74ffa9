"""Files of Hugging Face repositories, for sources.py and runs/lib/chat_tasks.py.

huggingface_hub does the transfers and keeps a cache. HF_ENDPOINT chooses another server and HF_TOKEN logs in.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from dataset import fail

SECONDS = 10  # without an answer, the network counts as missing


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Ends the script with an error message if a call of huggingface_hub in the `with` fails."""
    try:
        yield
    except Exception as problem:  # of huggingface_hub, of its HTTP client or of the disk
        advice = "check the names, the network, HF_ENDPOINT, HF_TOKEN and the disk space, then run it again"
        fail(f"{what}: {type(problem).__name__}: {problem}; {advice}")


def fetch(repo: str, name: str, commit: str | None = None) -> Path:
    """Path in the Hugging Face cache of a dataset repository's file, at a commit or at main."""
    from huggingface_hub import hf_hub_download

    with explained(f"fetching {name} of {repo}"):
        return Path(hf_hub_download(repo, name, repo_type="dataset", revision=commit))


def list_files(repo: str) -> tuple[str, dict[str, list]]:
    """(commit of main, {name: [size, digest]}) of a dataset repository: sha256 of large files, git's hash of others."""
    from huggingface_hub import HfApi

    api = HfApi()
    with explained(f"listing {repo}"):
        commit = api.repo_info(repo, repo_type="dataset", timeout=SECONDS).sha
        # So all files are of one commit, even if someone uploads meanwhile.
        entries = list(api.list_repo_tree(repo, repo_type="dataset", revision=commit, recursive=True))
    # Folders have no size.
    files = [entry for entry in entries if hasattr(entry, "size")]
    digests = {file.path: file.lfs.sha256 if file.lfs else file.blob_id for file in files}
    return commit, {file.path: [file.size, digests[file.path]] for file in files}
