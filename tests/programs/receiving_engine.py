"""An engine without a model: `receiving_engine.py SECRET_FILE [die|stop COUNT]`, for faults among several.

It prints its port once it listens. The gate's state and what pushes call are here as in vLLM; `Extension` is the real
one but for what it does with the tensors. After COUNT tensors of its first push it dies, or stops as a machine does
that hangs.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from hpcgrpo.generation import broadcast
from hpcgrpo.generation.vllm_extension import Extension

secret = Path(sys.argv[1]).read_text()
fault, count = (sys.argv[2], int(sys.argv[3])) if len(sys.argv) > 2 else ("", 0)
state: dict[str, Any] = {"instance": str(os.getpid()), "version": None, "busy": 0}


class Receiving(Extension):
    device, rank = torch.device("cpu"), 0

    def _load(self, tensors: Any) -> dict[str, Any]:
        received = {}
        for name, tensor in broadcast.ahead(tensors):
            received[name] = broadcast.fingerprint(tensor)
            if fault and len(received) == count:
                os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        return {"received": received, "loaded": {}}


extension = Receiving()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(state)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/hpcgrpo/version":
            state.update(body)
        if self.path == "/collective_rpc":
            self.answer({"results": [getattr(extension, body["method"])(**body["kwargs"])]})
        else:
            self.answer({})

    def answer(self, content: dict[str, Any]) -> None:
        known = self.headers.get("Authorization") == f"Bearer {secret}"
        self.send_response(200 if known else 401)
        self.end_headers()
        self.wfile.write(json.dumps(content if known else {}).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


torch.set_num_threads(1)
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
