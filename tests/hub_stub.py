"""A stand-in for the Hugging Face server on the loopback interface, as far as the tests use it.

start_hub() serves repositories from a dict {repo: {path: bytes}}, each as a dataset and as a model.
"""

import base64
import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from processes import serving


def names_of(hub: SimpleNamespace, folder: Path) -> dict[str, str]:
    """The environment in which huggingface_hub asks a hub, with its cache in a folder."""
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}


COMMIT = "c0ffee" + "0" * 34
API = "/api/(?:datasets|models)/([^/]+/[^/]+)"
REPO = "(?:/datasets)?/([^/]+/[^/]+)"
LARGE = (".bin", ".parquet", ".safetensors")


def git_blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def tree_entry(name: str, data: bytes) -> dict:
    entry = {"type": "file", "path": name, "size": len(data), "oid": git_blob_id(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


def missing(code: str) -> Response:
    return JSONResponse({}, 404, {"X-Error-Code": code, "X-Error-Message": code})


def read(hub: SimpleNamespace, request: Request) -> Response:
    """The answer to GET and HEAD."""
    path = request.url.path
    found = re.fullmatch(rf"{API}(/revision/[^/]+|/tree/[^/]+)?", path)
    found = found or re.fullmatch(rf"{REPO}/resolve/[^/]+/(.+)", path)
    if not found or found[1] not in hub.repos:
        return missing("RepoNotFound")
    files = hub.repos[found[1]]
    if "/resolve/" in path:
        return send_file(files[found[2]]) if found[2] in files else missing("EntryNotFound")
    if "/tree/" in path:
        return JSONResponse([tree_entry(name, data) for name, data in sorted(files.items())])
    return JSONResponse({"id": found[1], "sha": COMMIT, "siblings": [], "tags": [], "private": False})


def send_file(data: bytes) -> Response:
    etag = f'"{hashlib.sha256(data).hexdigest()}"'
    headers = {"ETag": etag, "X-Repo-Commit": COMMIT}
    return Response(data, 200, headers)


def post(hub: SimpleNamespace, path: str, body: bytes) -> Response:
    if path == "/api/repos/create":
        value = json.loads(body)
        repo = f"{value['organization']}/{value['name']}"
        value = {"url": f"{hub.url}/datasets/{repo}", "name": repo, "id": repo}
        if repo in hub.repos:
            return JSONResponse({**value, "error": "You already created this dataset repo"}, 409)
        hub.repos[repo] = {}
        return JSONResponse(value)
    if path == "/api/validate-yaml":  # of a model card
        return JSONResponse({"errors": [], "warnings": []})
    if re.fullmatch(f"{API}/preupload/[^/]+", path):
        names = [file["path"] for file in json.loads(body)["files"]]
        modes = {name: "lfs" if name.endswith(LARGE) else "regular" for name in names}
        files = [{"path": name, "uploadMode": modes[name], "shouldIgnore": False} for name in names]
        return JSONResponse({"files": files})
    if re.fullmatch(rf"{REPO}\.git/info/lfs/objects/batch", path):
        objects = [{"oid": item["oid"], "size": item["size"]} for item in json.loads(body)["objects"]]
        for item in objects:
            if item["oid"] not in hub.blobs:
                item["actions"] = {"upload": {"href": f"{hub.url}/lfs/{item['oid']}"}}
        return JSONResponse({"transfer": "basic", "objects": objects})
    if found := re.fullmatch(f"{API}/commit/[^/]+", path):
        for item in map(json.loads, body.splitlines()):
            value = item["value"]
            if item["key"] == "header":
                continue
            data = hub.blobs[value["oid"]] if item["key"] == "lfsFile" else base64.b64decode(value["content"])
            hub.repos[found[1]][value["path"]] = data
        return JSONResponse({"commitUrl": f"{hub.url}/datasets/{found[1]}/commit/{COMMIT}", "commitOid": COMMIT})
    return missing("RepoNotFound")


def put(hub: SimpleNamespace, path: str, body: bytes) -> Response:
    if hashlib.sha256(body).hexdigest() != path.removeprefix("/lfs/"):
        return Response(status_code=400)
    hub.blobs[path.removeprefix("/lfs/")] = body
    return Response()


@contextlib.contextmanager
def start_hub(repos: dict[str, dict[str, bytes]]) -> Iterator[SimpleNamespace]:
    """A running server: .url, .repos, .requests [(method, path)]."""
    hub = SimpleNamespace(repos=repos, requests=[], blobs={})

    async def answer(request: Request) -> Response:
        path = request.url.path
        hub.requests.append((request.method, path))
        if request.method in ("GET", "HEAD"):
            return read(hub, request)
        return (post if request.method == "POST" else put)(hub, path, await request.body())

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST", "PUT"])])
    with serving(app) as hub.url:
        yield hub
