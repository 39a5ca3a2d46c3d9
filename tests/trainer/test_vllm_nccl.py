"""Weights over NCCL: TRL's client and a fake server, whose group is a queue instead of a communicator."""

import asyncio
import contextlib
import os
import queue
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_vllm import VOCAB, FakeVLLM, reference_scores
from trl.experimental.async_distillation import weight_transfer
from vllm_fakes import all_up

from divopd_gym.errors import ConfigError
from divopd_trainer.engines import vllm_nccl
from divopd_trainer.engines.base import GenerateRequest
from divopd_trainer.engines.http import Server, ServerUnavailable
from divopd_trainer.engines.sync import make_weight_sync
from divopd_trainer.engines.vllm_nccl import NCCLSync
from divopd_trainer.engines.vllm_student import VLLMStudent
from divopd_trainer.engines.vllm_sync import SyncRefused
from divopd_trainer.engines.weights import write_policy

PROMPT = np.arange(2, 8, dtype=np.int32)


class Group:
    """Both ends of a communicator: a broadcast ends when the other end takes it, or when it is called off."""

    def __init__(self):
        self.tensors, self.alive, self.aborted = queue.Queue(maxsize=1), True, False
        self.group = SimpleNamespace(store=None, socket=None)

    def put(self, item):
        while True:
            if self.aborted:
                raise RuntimeError("called off")
            with contextlib.suppress(queue.Full):
                return self.tensors.put(item, timeout=0.02)

    def destroy(self):
        self.aborted = True


class NCCLServer(FakeVLLM):
    """Takes weights over a group; the tensor "weights" is the number of its table.

    Attributes:
        inits: Groups that it joined, over all its lives.
        answers: Path -> (status, text) to give once.
    """

    groups = {}

    def __init__(self, **options):
        self.inits, self.group, self.answers, self.transfer = [], None, {}, True
        super().__init__(**options)

    def start(self):
        if self.group is not None:
            self.group.alive = False
        self.group, self.paused, self.active = None, False, False
        super().start()

    def _get(self, handler):
        if handler.path == "/get_world_size":
            return self._send(handler, 200, {"world_size": 1})
        return super()._get(handler)

    def _post(self, handler, body):
        path = handler.path.partition("?")[0]
        if path in self.answers:
            self.requests.append((handler.path, body))
            return self._send(handler, *self._failure(*self.answers.pop(path)))
        act = getattr(self, "_" + path.strip("/"), None)
        if act is None or not self.transfer:
            return super()._post(handler, body)
        with self._lock:
            self.requests.append((handler.path, body))
        problem = act(body)
        return self._send(handler, *self._failure(500, problem) if problem else (200, {}))

    def _pause(self, body):
        self.paused = True

    def _resume(self, body):
        self.paused = False

    def _init_weight_transfer_engine(self, body):
        info = body["init_info"]
        assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 2, True)
        self.group = self.groups.setdefault(info["master_port"], Group())
        self.inits.append(info["master_port"])

    def _start_weight_update(self, body):
        if self.active:
            return "Worker failed with error 'a weight update is already active.'"
        assert self.paused
        assert self.running == 0
        self.active = True
        return None

    def _update_weights(self, body):
        if self.group is None:
            return "Worker failed with error 'no group'"
        info = body["update_info"]
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"]):
            got, tensor = self.group.tensors.get(timeout=20)
            assert (got, str(tensor.dtype), list(tensor.shape)) == (name, f"torch.{dtype}", shape)
            if name == "weights":
                self.weights = int(tensor[0])
        assert self.group.tensors.get(timeout=20) == ("end", None)
        self.loads += 1
        return None

    def _finish_weight_update(self, body):
        if not self.active:
            return "Worker failed with error 'no weight update is active.'"
        self.active = False
        return None


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """vLLM's and NCCL's part of TRL's client, in this process."""
    ports = iter(range(40000, 50000))

    def join(info):
        return NCCLServer.groups.setdefault(info["master_port"], Group())

    # All broadcasts of a process go through the same streams.
    streams = threading.Lock()

    def send(iterator, group, src, post_iter_func):
        with streams:
            assert group.alive, "a broadcast to nobody would never end"
            for item in iterator:
                group.put((item[0], post_iter_func(item).clone()))
            group.put(("end", None))

    NCCLServer.groups.clear()
    for name, value in {
        "is_vllm_available": lambda *args, **kwargs: True,
        "_HAS_STATEFUL_TRAINER_ENGINE": True,
        "get_ip": lambda: "127.0.0.1",
        "get_open_port": lambda: next(ports),
        "open_trainer_endpoint": join,
        "packed_nccl_broadcast_producer": send,
    }.items():
        monkeypatch.setattr(weight_transfer, name, value, raising=False)


@pytest.fixture
def server():
    fake = NCCLServer()
    yield fake
    fake.stop()


def policy(folder, version):
    tensors = {
        "embed.weight": torch.zeros(4, 3, dtype=torch.bfloat16),
        "weights": torch.tensor([float(version)]),
    }
    return write_policy(tensors, folder, version)


def play(fakes, use, **options):
    """Run something on a student that these servers serve."""

    async def run():
        student = VLLMStudent(
            [Server(fake.url) for fake in fakes],
            max_model_len=128,
            stop_ids=[1],
            sync=NCCLSync(20.0, "cpu"),
            request_timeout_s=30.0,
            **options,
        )
        try:
            return await use(student)
        finally:
            await student.aclose()

    return asyncio.run(run())


def of_weights(response, weights):
    """Whether the response's log-probs are those of a table."""
    whole = np.concatenate([PROMPT, response.token_ids])
    return np.allclose(response.logprobs, reference_scores(whole, weights)[len(PROMPT) :], atol=1e-4)


def test_weights_are_broadcast_while_the_server_stands_still(server, tmp_path):
    async def use(student):
        before = await student.generate(GenerateRequest(PROMPT, 6, seed=1))
        for version in (1, 2):
            await student.load_weights(policy(tmp_path, version), version)
        return before, await student.generate(GenerateRequest(PROMPT, 6, seed=1))

    before, after = play([server], use)
    assert of_weights(before, 0)
    assert of_weights(after, 2)
    assert after.policy_version == 2
    control = [path for path, _ in server.requests if not path.startswith("/v1")]
    round_ = [
        "/pause?mode=abort",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
        "/resume",
    ]
    begin = ["/pause?mode=abort", "/finish_weight_update", "/init_weight_transfer_engine"]
    assert control == [*begin, *round_[1:], *round_]
    assert server.bodies("/update_weights")[0]["update_info"] == {
        "names": ["embed.weight", "weights"],
        "dtype_names": ["bfloat16", "float32"],
        "shapes": [[4, 3], [1]],
    }


def test_several_servers_have_the_weights_before_the_version_rises(tmp_path):
    fakes = [NCCLServer() for _ in range(3)]
    try:

        async def use(student):
            await all_up(student)
            await student.load_weights(policy(tmp_path, 4), 4)
            assert [fake.weights for fake in fakes] == [4, 4, 4]
            return await asyncio.gather(
                *(student.generate(GenerateRequest(PROMPT, 4, seed=n)) for n in range(12))
            )

        responses = play(fakes, use)
        assert all(r.policy_version == 4 and of_weights(r, 4) for r in responses)
        assert len({port for fake in fakes for port in fake.inits}) == 3
    finally:
        for fake in fakes:
            fake.stop()


def test_a_restarted_server_joins_a_new_group_and_gets_the_weights_before_it_serves(server, tmp_path):
    async def use(student):
        await student.load_weights(policy(tmp_path, 3), 3)
        await asyncio.to_thread(server.restart)
        response = await student.generate(GenerateRequest(PROMPT, 6, seed=1))
        return response, dict(student.counters)

    response, counters = play([server], use)
    assert of_weights(response, 3)
    assert counters["restarts"] == 1
    assert len(server.inits) == len(set(server.inits)) == 2


def test_a_server_that_does_not_tell_its_lives_apart_is_refused(server, tmp_path):
    server.tells_identity = False
    with pytest.raises(SyncRefused, match="does not say when it was started"):
        play([server], lambda student: student.load_weights(policy(tmp_path, 1), 1))
    assert not server.paused
    assert server.inits == []


def test_an_update_left_open_by_somebody_who_was_killed_is_closed_first(server, tmp_path):
    server.active = True
    play([server], lambda student: student.load_weights(policy(tmp_path, 5), 5))
    assert server.weights == 5


def test_a_failed_transfer_is_made_again_in_a_new_group(server, tmp_path):
    async def use(student):
        await student.load_weights(policy(tmp_path, 1), 1)
        server.answers["/update_weights"] = (500, "Worker failed with error 'CUDA out of memory'")
        with pytest.raises(ServerUnavailable, match="did not get the weights over NCCL.*out of memory"):
            await student.load_weights(policy(tmp_path, 2), 2)
        return await student.generate(GenerateRequest(PROMPT, 6, seed=1))

    response = play([server], use)
    assert of_weights(response, 2)
    assert len(server.inits) == 2


def test_a_server_that_fails_while_it_receives_holds_up_no_other(tmp_path):
    fakes = [NCCLServer(), NCCLServer()]
    try:

        async def use(student):
            await all_up(student)
            await student.load_weights(policy(tmp_path, 1), 1)
            fakes[0].answers["/update_weights"] = (500, "Worker failed with error 'CUDA out of memory'")
            await student.load_weights(policy(tmp_path, 2), 2)
            while fakes[0].weights != 2:
                await asyncio.sleep(0.05)

        play(fakes, use)
        assert [fake.weights for fake in fakes] == [2, 2]
        assert [len(fake.inits) for fake in fakes] == [2, 1]
    finally:
        for fake in fakes:
            fake.stop()


def test_an_error_of_the_sending_side_is_told_at_once_with_its_cause(server, tmp_path, monkeypatch):
    read = vllm_nccl._Tensors._read

    def some(self, *args):
        try:
            yield next(read(self, *args))
            raise MemoryError("no room for weights")
        except MemoryError as error:
            self.error = error
            raise

    monkeypatch.setattr(vllm_nccl._Tensors, "_read", some)
    began = time.monotonic()
    with pytest.raises(ServerUnavailable, match="no room for weights.*must be started anew"):
        play([server], lambda student: student.load_weights(policy(tmp_path, 1), 1))
    assert time.monotonic() - began < 60  # a transfer has minutes
    assert all(group.aborted for group in NCCLServer.groups.values())


@pytest.mark.parametrize(
    "answer",
    [
        (404, "Not Found"),
        (500, "Weight transfer not configured"),
        (500, "Worker failed with error 'Duplicate GPU detected'"),
    ],
)
def test_a_server_that_can_join_no_group_is_told_why_and_goes_on(server, tmp_path, answer):
    server.answers["/init_weight_transfer_engine"] = answer
    with pytest.raises(SyncRefused, match='VLLM_SERVER_DEV_MODE=1.*"backend": "nccl".*another GPU'):
        play([server], lambda student: student.load_weights(policy(tmp_path, 1), 1))
    assert not server.paused


def test_a_policy_that_cannot_be_read_is_refused_and_the_server_goes_on(server, tmp_path):
    (tmp_path / "policy-1.safetensors").write_bytes(b"no weights")
    with pytest.raises(SyncRefused, match="cannot be read"):
        play([server], lambda student: student.load_weights(tmp_path / "policy-1.safetensors", 1))
    assert not server.paused
    assert server.inits == []


def test_a_transfer_that_never_ends_costs_its_deadline_and_is_called_off(server, tmp_path, monkeypatch):
    reached, release = threading.Event(), threading.Event()

    def receive(body):
        reached.set()
        release.wait(60)

    server._update_weights = receive
    try:
        with pytest.raises(ServerUnavailable, match="within 4 s"):
            play([server], lambda student: student.load_weights(policy(tmp_path, 1), 1), load_timeout_s=4.0)
        assert reached.is_set()
        stuck = [thread for thread in threading.enumerate() if thread.name == "divopd-nccl"]
        assert all(thread.daemon for thread in stuck)
        assert all(group.aborted for group in NCCLServer.groups.values())
    finally:
        release.set()
    # The thread that was left behind says nothing more to the server.
    for thread in stuck:
        thread.join(20)
    assert [path for path, _ in server.requests].count("/finish_weight_update") == 1


def test_proxies_of_the_environment_are_not_asked(server, tmp_path, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "elsewhere")
    play([server], lambda student: student.load_weights(policy(tmp_path, 6), 6))
    assert server.weights == 6
    assert os.environ["NO_PROXY"] == "elsewhere,127.0.0.1"


def test_weights_are_not_sent_from_a_gpu_without_room_for_the_buffers(server, tmp_path, monkeypatch):
    sync = NCCLSync(20.0, "cpu")
    sync._device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 10**9))
    with pytest.raises(SyncRefused, match="GPU has 0.0 GB free.*weight_sync to file"):
        sync._check_room(11)
    sync._check_room(10)


def test_a_machine_that_cannot_do_it_is_told_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match="no GPU.*weight_sync to file"):
        make_weight_sync("nccl", SimpleNamespace(load_timeout_s=1.0))


def test_the_fake_table_tells_versions_apart():
    assert VOCAB == 64
    assert not np.allclose(reference_scores(PROMPT, 1)[1:], reference_scores(PROMPT, 2)[1:], atol=1e-2)
