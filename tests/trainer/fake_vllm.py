"""A server that answers as vLLM does, in a thread, with a model of one table and faults on demand."""

import contextlib
import json
import socket
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from divopd_trainer.engines.base import EngineError
from divopd_trainer.engines.http import ServerRefusal

VOCAB = 64


def logits(token, weights=0, vocab=VOCAB):
    """float64 [vocab], the next token's logits; they depend on the last token and the weights alone."""
    return np.random.default_rng([weights, int(token)]).normal(size=vocab) * 2


def log_softmax(values):
    values = values - values.max()
    return values - np.log(np.exp(values).sum())


def reference_scores(ids, weights=0, vocab=VOCAB):
    """float64 [T]: entry i scores ids[i] given all before it; NaN for the first."""
    return np.array([np.nan, *(log_softmax(logits(a, weights, vocab))[b] for a, b in zip(ids[:-1], ids[1:]))])


class FakeVLLM:
    """One server.

    Args:
        vocab: Ids that it knows.
        max_model_len: Tokens of prompt and response.
        mode: "processed_logprobs", "raw_logprobs" or "raw_logits".
        tokenizer: A transformers tokenizer for /tokenize.
        adapters: Whether adapters can be loaded while it runs; their path is the number of their weights.
        max_loras: What /server_info says; None: there is no such answer.
        max_logprobs: Most candidates.
        key: What requests must carry.
        stop_id: Ends a response beside the ids of the request.
        never_stop: No id ends a response.

    Attributes:
        requests: (path, body) of every POST, in order.
        faults: Taken one a completion: a status, "drop", "truncate", "nan", "abort", ("late", seconds),
            ("edit", function on the answer), or None.
    """

    def __init__(
        self,
        vocab=VOCAB,
        max_model_len=128,
        mode="processed_logprobs",
        tokenizer=None,
        adapters=False,
        max_loras=None,
        max_logprobs=20,
        key=None,
        stop_id=1,
        never_stop=False,
    ):
        self.__dict__.update({name: value for name, value in locals().items() if name != "self"})
        self.requests, self.faults = [], deque()
        self.identity = self.loads = 0
        self.tells_identity = True
        self.delay = self.metrics_delay = 0.0
        self.running = self.most_running = 0
        self._port, self._lock, self._connections = 0, threading.Lock(), set()
        self.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self._port}"

    def start(self):
        """Begin a new life on the same port, with the first weights and no adapter."""
        self.identity += 1
        self.weights, self.loaded = 0, {}
        self.alive = True
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                fake._connections.add(self.connection)

            def finish(self):
                fake._connections.discard(self.connection)
                super().finish()

            def handle(self):
                with contextlib.suppress(OSError):
                    super().handle()

            def log_message(self, *args):
                pass

            def do_GET(self):
                fake._get(self)

            def do_POST(self):
                length = int(self.headers.get("content-length") or 0)
                body = self.rfile.read(length)
                if len(body) == length:  # else the connection was broken by `stop`
                    fake._post(self, json.loads(body or "null"))

        class Http(ThreadingHTTPServer):
            daemon_threads, block_on_close, allow_reuse_address, request_queue_size = True, False, True, 256

        self._http = Http(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_address[1]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def stop(self):
        """End as a killed process does: every connection breaks."""
        self.alive = False
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def restart(self):
        self.stop()
        self.start()

    def bodies(self, path="/v1/completions"):
        return [body for where, body in self.requests if where == path]

    # --- answers -----------------------------------------------------------------------------------------------

    def _get(self, handler):
        path = handler.path.partition("?")[0]
        if path == "/health":
            return self._send(handler, 200, "")
        if path == "/v1/models":
            if self._refused(handler):
                return None
            cards = [{"id": "base", "max_model_len": self.max_model_len}]
            return self._send(handler, 200, {"data": cards + [{"id": name} for name in self.loaded]})
        if path == "/metrics" and self.tells_identity:
            time.sleep(self.metrics_delay)
            return self._send(
                handler, 200, f"# TYPE x gauge\nprocess_start_time_seconds {self.identity}.5e+09\n"
            )
        if path == "/server_info" and self.max_loras is not None:
            lora = {"max_loras": self.max_loras} if self.max_loras else None
            return self._send(handler, 200, {"vllm_config": {"lora_config": lora}})
        return self._send(handler, 404, {"detail": "Not Found"})

    def _post(self, handler, body):
        with self._lock:
            self.requests.append((handler.path, body))
        if self._refused(handler):
            return None
        if handler.path == "/tokenize" and self.tokenizer is not None:
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]
            return self._send(handler, 200, {"tokens": ids, "count": len(ids)})
        if handler.path == "/v1/load_lora_adapter" and self.adapters:
            if not body["lora_name"] or body["lora_name"] in self.loaded:
                return self._send(handler, *self._failure(400, "already loaded, or no name"))
            self.loads += 1
            self.loaded[body["lora_name"]] = int(body["lora_path"])
            return self._send(handler, 200, "Success")
        if handler.path == "/v1/unload_lora_adapter" and self.adapters:
            self.loaded.pop(body["lora_name"], None)
            return self._send(handler, 200, "Success")
        if handler.path == "/fake/weights":
            self.loads += 1
            self.weights = body["weights"]
            return self._send(handler, 200, {})
        if handler.path == "/v1/completions":
            with self._lock:
                self.running += 1
                self.most_running = max(self.running, self.most_running)
                fault = self.faults.popleft() if self.faults else None
            try:
                answer = self._complete(body, fault)
            finally:
                with self._lock:  # before the answer leaves: its client may ask again sooner
                    self.running -= 1
            if fault == "drop":
                return handler.connection.shutdown(socket.SHUT_RDWR)
            return self._send(handler, *answer, cut=fault == "truncate")
        return self._send(handler, 404, {"detail": "Not Found"})

    def _complete(self, body, fault):
        """Status and content of the answer."""
        time.sleep(self.delay)
        if isinstance(fault, tuple) and fault[0] == "late":
            time.sleep(fault[1])
        if isinstance(fault, int):
            return self._failure(fault, f"fault {fault}")
        prompt = body["prompt"]
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return self._failure(400, f"This model's maximum context length is {self.max_model_len} tokens.")
        if max(prompt) >= self.vocab:
            return self._failure(400, "Token id is out of vocabulary")
        if max(body.get("prompt_logprobs") or 0, body.get("logprobs") or 0) > self.max_logprobs:
            return self._failure(400, "Requested more log-probs than max allowed")
        model = body.get("model")
        if model is not None and model != "base" and model not in self.loaded:
            return self._failure(404, f"The model `{model}` does not exist.")
        weights = self.loaded.get(model, self.weights)
        answer = {"choices": [self._sample(body, prompt, weights)], "usage": {"prompt_tokens": len(prompt)}}
        if body.get("prompt_logprobs") is not None:
            answer["choices"][0]["prompt_logprobs"] = self._score(prompt, body["prompt_logprobs"], weights)
        if fault == "abort":
            answer["choices"][0]["finish_reason"] = "abort"
        if fault == "nan":
            for row in answer["choices"][0].get("prompt_logprobs") or ():
                for entry in (row or {}).values():
                    entry["logprob"] = float("nan")
            if answer["choices"][0]["logprobs"]:
                values = answer["choices"][0]["logprobs"]["token_logprobs"]
                values[:] = [float("nan")] * len(values)
        if isinstance(fault, tuple) and fault[0] == "edit":
            fault[1](answer)
        return 200, answer

    def _sample(self, body, prompt, weights):
        rng = np.random.default_rng(body.get("seed"))
        heat = body["temperature"]
        stops = {*body.get("stop_token_ids", []), self.stop_id}
        ids, logprobs, tops, last = [], [], [], prompt[-1]
        while len(ids) < body["max_tokens"]:
            raw = logits(last, weights, self.vocab)
            drawn = log_softmax(raw / (heat or 1.0))
            reported = {"processed_logprobs": drawn, "raw_logprobs": log_softmax(raw), "raw_logits": raw}[
                self.mode
            ]
            last = int(raw.argmax()) if heat == 0 else int(rng.choice(self.vocab, p=np.exp(drawn)))
            ids.append(last)
            logprobs.append(float(reported[last]))
            best = [int(i) for i in np.argsort(-reported)[: body.get("logprobs") or 0]]
            tops.append({f"token_id:{i}": float(reported[i]) for i in [last, *best]})
            if last in stops and not self.never_stop:
                break
        named = [f"token_id:{i}" for i in ids]
        shown = {"tokens": named, "token_logprobs": logprobs, "top_logprobs": tops}
        return {
            "index": 0,
            "text": "?",
            "token_ids": ids,
            "prompt_token_ids": prompt,
            "logprobs": shown if body.get("logprobs") is not None else None,
            "finish_reason": "stop" if ids[-1] in stops and not self.never_stop else "length",
        }

    def _score(self, prompt, topk, weights):
        rows = [None]
        for before, token in zip(prompt[:-1], prompt[1:]):
            scores = log_softmax(logits(before, weights, self.vocab))
            order = [int(i) for i in np.argsort(-scores)]
            kept = dict.fromkeys([token, *order[:topk]])
            rows.append(
                {
                    str(i): {"logprob": float(scores[i]), "rank": order.index(i) + 1, "decoded_token": "?"}
                    for i in kept
                }
            )
        return rows

    def _refused(self, handler):
        if self.key is None or handler.headers.get("authorization") == f"Bearer {self.key}":
            return False
        self._send(handler, 401, {"error": "Unauthorized"})
        return True

    @staticmethod
    def _failure(status, message):
        return status, {"error": {"message": message, "code": status}}

    def _send(self, handler, status, content, cut=False):
        text = isinstance(content, str)
        data = content.encode() if text else json.dumps(content).encode()
        if cut:
            data = data[: len(data) // 2]
        with contextlib.suppress(OSError):
            handler.send_response(status)
            handler.send_header("content-type", "text/plain" if text else "application/json")
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
            handler.wfile.flush()


class FakeSync:
    """Weights are numbers; `source` is one.

    Args:
        adapters: See `WeightSync`.
        fails: Errors raised by the next pushes to an address, by address.
    """

    def __init__(self, adapters=False, purpose="train"):
        self.adapters, self.purpose = adapters, purpose
        self.pushed, self.retired, self.fails = [], [], {}

    async def push(self, server, source, version, load):
        self.pushed.append((server.url, version))
        if self.fails.get(server.url):
            raise self.fails[server.url].pop(0)
        if not self.adapters:
            await server.post("/fake/weights", {"weights": int(source)})
            return None
        name = f"{self.purpose}-{version}-{load}"
        try:
            await server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(source)})
        except ServerRefusal as error:
            if "already loaded" not in str(error):
                raise EngineError(str(error)) from error
        return name

    async def retire(self, server, model):
        self.retired.append((server.url, model))
        await server.post("/v1/unload_lora_adapter", {"lora_name": model})


def make_sync(config, purpose):
    """For ``weight_sync: fake_vllm:make_sync``."""
    return FakeSync(purpose=purpose)


def make_adapter_sync(config, purpose):
    """For ``weight_sync: fake_vllm:make_adapter_sync``."""
    return FakeSync(adapters=True, purpose=purpose)
