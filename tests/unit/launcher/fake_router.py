"""Stands in for vllm-router: hands each request to the prefill server and then to the decode server.

Usage: fake_router.py ROUTER_ARGS... with --prefill, --decode and --port among them.
"""

from __future__ import annotations

import os
import signal
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    options = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    servers = [options["--prefill"], options["--decode"]]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.forward(None)

        def do_POST(self) -> None:
            self.forward(self.rfile.read(int(self.headers["Content-Length"])))

        def forward(self, body: bytes | None) -> None:
            answer = b""
            for server in servers:
                with urllib.request.urlopen(urllib.request.Request(server + self.path, data=body)) as response:
                    answer = response.read()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    HTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()


if __name__ == "__main__":
    main()
