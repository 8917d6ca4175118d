"""A hub on this machine: as much of the Hugging Face hub's HTTP as its own client needs.

It never keeps more than one commit a branch, and knows no large-file storage.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

RepoFiles = dict[str, bytes]


@dataclass
class FakeHub:
    """A running hub.

    repos: files by model, branch and name. log: (method, path, Range header, token) of each
    request. broken: file name -> the bytes after which the connection ends, once.
    """

    url: str = ""
    repos: dict[str, dict[str, RepoFiles]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    truncated_files: dict[str, int] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)

    def range_headers(self, method: str, name: str) -> list[str | None]:
        """Return the Range headers of the requests for a file."""
        return [
            span for how, path, span, _ in self.requests if how == method and path.endswith(name)
        ]


def commit_hash(files: RepoFiles) -> str:
    """Return the hash of a commit: of all names and contents."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


@contextmanager
def run_fake_hub() -> Iterator[FakeHub]:
    """Yield a hub that answers on a port of its own."""
    hub = FakeHub()
    handler = type("Bound", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    """The requests of the client, one method a verb."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def _note(self) -> str:
        path = unquote(urlsplit(self.path).path)
        said = self.headers.get
        self.hub.requests.append((self.command, path, said("Range"), said("Authorization")))
        return path

    def _json(self, value: Any, status: int = 200, **headers: str) -> None:
        self._bytes(json.dumps(value).encode(), status, **headers)

    def _bytes(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _missing(self, code: str) -> None:
        self._json({"error": code}, 404, X_Error_Code=code)

    def _files(self, name: str, revision: str) -> RepoFiles | None:
        """Return the files of a branch or a commit; answer for what is not there."""
        if name not in self.hub.repos or (
            name in self.hub.private and self.headers.get("Authorization") != "Bearer secret"
        ):
            self._missing("RepoNotFound")
            return None
        branches = self.hub.repos[name]
        for branch, files in branches.items():
            if revision in (branch, commit_hash(files)):
                return files
        self._missing("RevisionNotFound")
        return None

    def do_GET(self) -> None:
        """Tell of a model, list its files, or send one."""
        path = self._note()
        if told := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            if (files := self._files(told[1], told[2])) is not None:
                siblings = [{"rfilename": name} for name in files]
                self._json({"id": told[1], "sha": commit_hash(files), "siblings": siblings})
        elif told := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            if (files := self._files(told[1], told[2])) is not None:
                self._json([{"type": "file", "path": name, "size": len(content),
                             "oid": hashlib.sha1(content).hexdigest()}
                            for name, content in files.items()])  # fmt: skip
        elif told := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if (files := self._files(told[1], told[2])) is not None:
                self._send(files, told[3])
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET  # noqa: N815 - the name that the library calls

    def _send(self, files: RepoFiles, name: str) -> None:
        if name not in files:
            self._missing("EntryNotFound")
            return
        content = files[name]
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        first = int(span[1]) if span else 0
        headers = {"ETag": tag, "X_Repo_Commit": commit_hash(files)}
        if span:
            headers["Content_Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if self.command == "GET" and name in self.hub.truncated_files:
            end = self.hub.truncated_files.pop(name)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:end])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self._bytes(content[first:], 206 if span else 200, **headers)

    def do_POST(self) -> None:
        """Make a repository or a branch, or take a commit."""
        path, body = self._note(), self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            said = json.loads(body)
            name = f"{said['organization']}/{said['name']}"
            known = name in self.hub.repos
            self.hub.repos.setdefault(name, {"main": {}})
            if said.get("visibility") == "private":
                self.hub.private.add(name)
            self._json({"url": f"{self.hub.url}/{name}"}, 409 if known else 200)
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif told := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            branches = self.hub.repos[told[1]]
            branches.setdefault(told[2], dict(branches["main"]))
            self._json({})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", path):
            self._json({"files": [{"path": one["path"], "uploadMode": "regular",
                                   "shouldIgnore": False}
                                  for one in json.loads(body)["files"]]})  # fmt: skip
        elif told := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            files = self.hub.repos[told[1]][told[2]]
            for line in body.splitlines():
                one = json.loads(line)
                if one["key"] == "file":
                    files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            sha = commit_hash(files)
            url = f"{self.hub.url}/{told[1]}/commit/{sha}"
            self._json({"success": True, "commitOid": sha, "commitUrl": url})
        else:
            self._missing("EntryNotFound")
