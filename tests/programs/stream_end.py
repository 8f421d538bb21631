"""One end of a broadcast stream that is not the sender: `stream_end.py PORT RANK WORLD TIMEOUT [die|stop]`.

Prints `ready`, then a fingerprint for each tensor, then `end` or `error ...`. `die` and `stop` come after one tensor.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from hpcgrpo.generation import broadcast

port, rank, world = map(int, sys.argv[1:4])
fault = sys.argv[5] if len(sys.argv) > 5 else ""
torch.set_num_threads(1)
print("ready", flush=True)
group = broadcast.Group(
    rank=rank, world_size=world, backend="gloo", own_address="127.0.0.1", master=("127.0.0.1", port),
    device=torch.device("cpu"), timeout_seconds=float(sys.argv[4]),
)  # fmt: skip
try:
    for count, (name, tensor) in enumerate(broadcast.receive(group)):
        if fault and count == 1:
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        print(name, broadcast.fingerprint(tensor), flush=True)
    print("end", flush=True)
except broadcast.StreamError as error:
    print("error", error, flush=True)
os._exit(0)
