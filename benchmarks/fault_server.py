"""One vLLM-like server that can be killed: ``python benchmarks/fault_server.py ROLE PORT LOG``."""

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]

from fake_vllm import FakeVLLM  # noqa: E402

VOCAB, LENGTH, END = 300, 4000, 256
TURN_S = 0.05


class FaultServer(FakeVLLM):
    """A `FakeVLLM` on a given port that logs its answers as it gives them and takes its faults over HTTP.

    ``POST /fake/faults {"faults": [...]}`` queues faults for the next completions. The log has one JSON object a
    completion: when, the request's seed, whether it was scoring, the fault.
    """

    def __init__(self, role, port, log):
        self.wanted_port, self.log = port, open(log, "a", buffering=1)  # noqa: SIM115
        super().__init__(vocab=VOCAB, max_model_len=LENGTH, stop_id=END)
        self.delay = TURN_S if role == "student" else 0.0

    def start(self):
        self._port = self.wanted_port
        # Another process is another life.
        self.identity = int(time.time())
        super().start()

    def _post(self, handler, body):
        if handler.path != "/fake/faults":
            return super()._post(handler, body)
        self.faults.extend(tuple(f) if isinstance(f, list) else f for f in body["faults"])
        return self._send(handler, 200, {})

    def _complete(self, body, fault):
        answer = super()._complete(body, fault)
        line = {"t": time.time(), "seed": body.get("seed"), "fault": fault}
        self.log.write(json.dumps(line | {"scoring": body.get("prompt_logprobs") is not None}) + "\n")
        return answer


if __name__ == "__main__":
    role, port, log = sys.argv[1:]
    FaultServer(role, int(port), log)
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)
