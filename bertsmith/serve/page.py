"""Serve the web page: static files, whose scripts call the server's JSON endpoints.

The path of each file except "/" contains a hash of all files, so that browsers can cache the files
forever and never mix two versions.
"""

import hashlib
from importlib.resources import files
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_PREFIX: Final = "/page/"
_MEDIA_TYPES: Final = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
#: Replaced in index.html by the hash of all files.
_VERSION_MARK: Final = b"page/VERSION/"
_INDEX_HEADERS: Final = {
    # No inline scripts or styles, and no request to another host.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
_FILE_HEADERS: Final = {"Cache-Control": "public, max-age=31536000, immutable"}


def is_page_path(path: str) -> bool:
    """Return whether a path belongs to the web page."""
    return path == "/" or path.startswith(_PREFIX)


class Page:
    """The files of the web page, in memory.

    Attributes:
        version: hash of all files.
    """

    def __init__(self) -> None:
        contents = _read_files()
        digest = hashlib.sha256()
        for name, content in sorted(contents.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        self.version = digest.hexdigest()[:16]
        index = contents.pop("index.html")
        self._index = index.replace(_VERSION_MARK, f"page/{self.version}/".encode())
        self._contents = contents

    def routes(self) -> list[Route]:
        """Return the routes of the page; they accept GET and HEAD."""
        return [
            Route("/", self._send_index, include_in_schema=False),
            Route(f"{_PREFIX}{{version}}/{{name}}", self._send_file, include_in_schema=False),
        ]

    async def _send_index(self, request: Request) -> Response:
        """Return index.html, or 304 if the browser has this version."""
        headers = {**_INDEX_HEADERS, "ETag": f'"{self.version}"'}
        if headers["ETag"] in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(self._index, headers=headers, media_type=_MEDIA_TYPES["html"])

    async def _send_file(self, request: Request) -> Response:
        """Return a file of this version."""
        name = request.path_params["name"]
        if request.path_params["version"] != self.version or name not in self._contents:
            raise HTTPException(404)
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        return Response(self._contents[name], headers=_FILE_HEADERS, media_type=media_type)


def _read_files() -> dict[str, bytes]:
    """Return the content of each static file by name."""
    folder = files("bertsmith.serve").joinpath("static")
    return {file.name: file.read_bytes() for file in folder.iterdir()}
