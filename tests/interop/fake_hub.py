"""A local HTTP server with the part of the Hugging Face hub's API that ``huggingface_hub`` needs.

Each branch has a single commit. Large-file storage is not supported.
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
    """The state of the server.

    Attributes:
        url: The server's URL.
        repos: File contents by repository, branch and file name.
        requests: Method, path, Range header and Authorization header of each request.
        truncated_files: For each file name, the number of bytes after which the connection is
            closed in the next download of the file.
        private: Names of the repositories that require the token "secret".
    """

    url: str = ""
    repos: dict[str, dict[str, RepoFiles]] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)
    truncated_files: dict[str, int] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)

    def range_headers(self, method: str, name: str) -> list[str | None]:
        """Return the Range headers of all requests with an HTTP method for a file name."""
        return [
            byte_range
            for request_method, path, byte_range, _ in self.requests
            if request_method == method and path.endswith(name)
        ]


def commit_hash(files: RepoFiles) -> str:
    """Return the hash of a commit, computed from all file names and contents."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


@contextmanager
def run_fake_hub() -> Iterator[FakeHub]:
    """Run the server on a free port until the context ends."""
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
    """HTTP request handler of the fake hub."""

    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Suppress the access log."""

    def _log_request(self) -> str:
        """Add the request to ``FakeHub.requests``; return its path."""
        path = unquote(urlsplit(self.path).path)
        header = self.headers.get
        self.hub.requests.append((self.command, path, header("Range"), header("Authorization")))
        return path

    def _send_json(self, value: Any, status: int = 200, **headers: str) -> None:
        """Send a response with a JSON value."""
        self._send_bytes(json.dumps(value).encode(), status, **headers)

    def _send_bytes(self, content: bytes, status: int = 200, **headers: str) -> None:
        """Send a response with ``content``."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_not_found(self, code: str) -> None:
        """Send a 404 response with an error code of the hub."""
        self._send_json({"error": code}, 404, X_Error_Code=code)

    def _find_files(self, name: str, revision: str) -> RepoFiles | None:
        """Return the files of a branch or commit.

        If the repository or the revision does not exist, send a 404 response and return None.
        """
        if name not in self.hub.repos or (
            name in self.hub.private and self.headers.get("Authorization") != "Bearer secret"
        ):
            self._send_not_found("RepoNotFound")
            return None
        branches = self.hub.repos[name]
        for branch, files in branches.items():
            if revision in (branch, commit_hash(files)):
                return files
        self._send_not_found("RevisionNotFound")
        return None

    def do_GET(self) -> None:
        """Send information about a repository, the list of its files, or a file."""
        path = self._log_request()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path):
            if (files := self._find_files(match[1], match[2])) is not None:
                siblings = [{"rfilename": name} for name in files]
                self._send_json({"id": match[1], "sha": commit_hash(files), "siblings": siblings})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?", path):
            if (files := self._find_files(match[1], match[2])) is not None:
                self._send_json(
                    [
                        {
                            "type": "file",
                            "path": name,
                            "size": len(content),
                            "oid": hashlib.sha1(content).hexdigest(),
                        }
                        for name, content in files.items()
                    ]
                )
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if (files := self._find_files(match[1], match[2])) is not None:
                self._send_file(files, match[3])
        else:
            self._send_not_found("EntryNotFound")

    do_HEAD = do_GET  # noqa: N815 - name required by BaseHTTPRequestHandler

    def _send_file(self, files: RepoFiles, name: str) -> None:
        """Send a file or, for a Range request, the end of a file."""
        if name not in files:
            self._send_not_found("EntryNotFound")
            return
        content = files[name]
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        byte_range = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(byte_range[1]) if byte_range else 0
        headers = {"ETag": tag, "X_Repo_Commit": commit_hash(files)}
        if byte_range:
            headers["Content_Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
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
        self._send_bytes(content[start:], 206 if byte_range else 200, **headers)

    def do_POST(self) -> None:
        """Create a repository, a branch or a commit."""
        path = self._log_request()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path == "/api/repos/create":
            request = json.loads(body)
            name = f"{request['organization']}/{request['name']}"
            exists = name in self.hub.repos
            self.hub.repos.setdefault(name, {"main": {}})
            if request.get("visibility") == "private":
                self.hub.private.add(name)
            self._send_json({"url": f"{self.hub.url}/{name}"}, 409 if exists else 200)
        elif path == "/api/validate-yaml":
            self._send_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            branches = self.hub.repos[match[1]]
            branches.setdefault(match[2], dict(branches["main"]))
            self._send_json({})
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", path):
            self._send_json(
                {
                    "files": [
                        {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                        for file in json.loads(body)["files"]
                    ]
                }
            )
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            files = self.hub.repos[match[1]][match[2]]
            for line in body.splitlines():
                operation = json.loads(line)
                if operation["key"] == "file":
                    files[operation["value"]["path"]] = base64.b64decode(
                        operation["value"]["content"]
                    )
            sha = commit_hash(files)
            url = f"{self.hub.url}/{match[1]}/commit/{sha}"
            self._send_json({"success": True, "commitOid": sha, "commitUrl": url})
        else:
            self._send_not_found("EntryNotFound")
