"""Stands in for vLLM's server where a test wants faults at once: `stand_in_server.py PORT WHAT`.

fail: an error before it is up. serve: /health and /metrics, until killed; at SIGUSR1 it ends with code 7.
silent: takes connections and answers none. It starts a child that would outlive it, as vLLM's engine would.
"""

from __future__ import annotations

import http.server
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

port, what, children = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
child = subprocess.Popen(["sleep", "300"])
with children.open("a") as file:
    file.write(f"{os.getpid()}\n{child.pid}\n")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer s3cret"
        self.send_response(200 if self.path == "/health" or known else 401)
        self.end_headers()
        self.wfile.write(b'# HELP\nvllm:generation_tokens_total{engine="0"} 40.0\n')

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(http.server.HTTPServer):
    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()


if what == "fail":
    print("loading the model", file=sys.stderr)
    raise ValueError("the weights are damaged")
if what == "silent":
    listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
    time.sleep(300)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
server = Server(("127.0.0.1", port), Handler)
server.serve_forever()
