"""A hub on this machine: answers what `snapshot_download` asks, from one model's folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "c" * 40


@contextmanager
def paper_hub(hub_id: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield its URL, for HF_ENDPOINT, and the files that were fetched so far."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0]
            name = path.rpartition("/")[2]
            if path.startswith(f"/api/models/{hub_id}/tree/"):
                tree = [
                    {"type": "file", "path": each.name, "size": each.stat().st_size, "oid": each.name}
                    for each in folder.iterdir()
                ]
                self.send(json.dumps(tree).encode(), {})
            elif path.startswith(f"/api/models/{hub_id}"):
                files = [{"rfilename": each.name} for each in folder.iterdir()]
                self.send(json.dumps({"id": hub_id, "sha": COMMIT, "siblings": files}).encode(), {})
            elif path.startswith(f"/{hub_id}/resolve/") and (folder / name).is_file():
                content = (folder / name).read_bytes()
                etag = hashlib.sha256(content).hexdigest()
                if with_body:  # before it is sent: who has it may look at once
                    fetched.append(name)
                self.send(content if with_body else b"", {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, len(content))
            else:
                self.send_error(404)

        def send(self, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
            self.send_response(200)
            for name, value in {**headers, "Content-Length": str(len(body) if length is None else length)}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
