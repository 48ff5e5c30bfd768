"""Uploads: the directory of uploaded and saved individuals stays within a total size.

An uploaded file is deleted as soon as it is read (`page`); what is never read ends here. Requests
that Gradio would answer with its own error, such as a call of no function, are refused here, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from causal_qwen.serving.security import replay

BLOCK = 4096  # bytes that the smallest file takes
ADDRESS = re.compile(r"\s*[a-z][a-z0-9+.-]*://", re.IGNORECASE)
ENDPOINT = re.compile(r"/gradio_api/(?:run|api|call|call/v2)/([^/]+)/?")
UNUSED = ("/gradio_api/deep_link", "/gradio_api/process_recording")  # of Gradio; they write files


class BoundedFiles:
    """ASGI middleware: before every write, the oldest files are deleted to keep within a size.

    `functions` are those of the page: index -> function.
    """

    def __init__(
        self, app: ASGIApp, directory: Path, max_bytes: int, functions: Mapping[int, Any]
    ) -> None:
        self.app, self.directory, self.max_bytes = app, directory, max_bytes
        self.indices = {str(index) for index in functions}
        self.endpoints = {one.api_name for one in functions.values()}
        self.kept = frozenset(_files(directory))  # of the page as every visitor first sees it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"].startswith(UNUSED):
                await PlainTextResponse("Not Found", 404)(scope, receive, send)
                return
            if scope["method"] not in ("GET", "HEAD"):
                self.prune()
                body: bytes = (await receive())["body"]  # whole: `Guard` has read it
                tree = _parse(body)
                if names_address(tree):
                    message = "Files are uploaded, not fetched from an address.\n"
                    await PlainTextResponse(message, 400)(scope, receive, send)
                    return
                if not self.has_function(scope["path"], tree):
                    message = "There is no such function.\n"
                    await PlainTextResponse(message, 404)(scope, receive, send)
                    return
                if tree is not None and b"\\ud" in body.lower():
                    # half of a character, which cannot be encoded, becomes a question mark
                    body = json.dumps(tree, ensure_ascii=False).encode("utf-8", "replace")
                receive = replay(body, receive)
        await self.app(scope, receive, send)

    def has_function(self, path: str, tree: Any) -> bool:
        """Whether the function that a request names, by index or by endpoint, exists."""
        index = tree.get("fn_index") if isinstance(tree, dict) else None
        if index is not None:
            return str(index) in self.indices
        found = ENDPOINT.fullmatch(path)
        return found is None or found[1] in self.endpoints

    def prune(self) -> None:
        """Delete the oldest files beyond the total size."""
        found = []
        for path in _files(self.directory):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                if path not in self.kept:
                    facts = path.stat()
                    found.append((facts.st_mtime, max(facts.st_size, BLOCK), path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                return
            remove(path)
            total -= size


def _parse(body: bytes) -> Any:
    """The JSON of a request; None for a form, and for what Gradio could not read either."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def names_address(tree: Any) -> bool:
    """Whether a file of a request is an address, which Gradio would fetch."""
    nodes = [tree]
    for node in nodes:  # grows as it goes
        if isinstance(node, dict):
            path = node.get("path")  # `url` is where the page shows an uploaded file
            if isinstance(path, str) and ADDRESS.match(path):
                return True
        nodes += node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return False


def remove(path: Path) -> None:
    """Delete a file, and its directory if nothing else is in it."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]
