"""Whole policies broadcast to vLLM servers over NCCL, by TRL's weight-transfer client: no shared folder is needed.

The explorer, which runs beside the learner's main rank, reads the policy file and sends it from that rank's GPU. Each
server has a group of its own with it, so servers may come and go one by one. NCCL refuses a group with one GPU twice:
a student server must not run on the learner's first GPU. NCCL knows no deadline: one that passes leaves a thread behind
and a server that must be started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError, safe_open

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.http import Server, ServerUnavailable
from divopd_trainer.engines.vllm_sync import SyncRefused, WholePolicySync
from divopd_trainer.vllm_plugin import UNCHANGED

__all__ = ["NCCLSync", "broadcast"]

T = TypeVar("T")

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What TRL's client says of an answer that will not change, and a server of a group that cannot be.
_FINAL = re.compile(r"Request failed: (?!408|429|5\d\d)\d+|Weight transfer not configured")
_NO_GROUP = re.compile(f"{_FINAL.pattern}|Worker failed with error")
# vLLM packs tensors into buffers of so many bytes, to which the last tensor of each comes on top, and keeps two of them.
_BUFFER_BYTES, _BUFFERS = 1 << 30, 2


@dataclass
class _Group:
    """A server's group with this process.

    Attributes:
        client: TRL's.
        identity: The server's life that it belongs to.
        weights: What the client announces.
    """

    client: Any
    identity: str
    weights: dict[str, list]

    def close(self) -> None:
        """Never used again, whatever of it may still be running."""
        # What TRL's client may still tell the server would fall into the next update.
        self.client.vllm.finish_weight_update = lambda **_: None
        # An endless broadcast would hold up all later ones of its streams, which vLLM keeps.
        packed = sys.modules.get("vllm.distributed.weight_transfer.packed_tensor")
        if forget := getattr(getattr(packed, "_get_streams", None), "cache_clear", None):
            forget()
        threading.Thread(target=self._end, name="divopd-nccl-end", daemon=True).start()

    def _end(self) -> None:
        if (group := self.client.model_update_group) is not None:
            group.destroy()
            self.client.destroy()


class NCCLSync(WholePolicySync):
    """Policies over NCCL (vLLM's weight-transfer engine ``nccl``), to one server after another.

    Args:
        timeout_s: Seconds for the handshake with a server, and for one transfer.
        device: Where tensors are sent from.
        connect: ``connect(url, weights, timeout_s)`` makes a client with the methods of TRL's `WeightTransferClient`;
            ``weights`` has the lists names, dtype_names and shapes.
    """

    backend = "nccl"

    def __init__(
        self,
        timeout_s: float = 900.0,
        device: str = "cuda",
        connect: Callable[[str, dict[str, list], float], Any] | None = None,
    ) -> None:
        super().__init__()
        self._timeout_s, self._device = timeout_s, torch.device(device)
        self._connect = connect or _trl_client
        self._groups: dict[str, _Group] = {}
        self._sending = asyncio.Lock()

    async def transfer(self, server: Server, policy: Path, version: int) -> None:
        """Broadcast the file's tensors to a server, joined in a group anew if it is another one than the last time."""
        weights, buffer = await asyncio.to_thread(_announced, policy)
        # Buffers for one server at a time: they lie on the learner's GPU.
        async with self._sending:
            self._check_room((_BUFFERS + 1) * buffer)
            group = await self._group(server, weights)
            tensors = _Tensors(policy, weights["names"], self._device)
            try:
                await _watched(lambda: group.client.send_weights(tensors), tensors)
            except Exception as error:
                raise self._failure(server, error, _FINAL) from error
            except BaseException:
                self._drop(server)
                raise
            finally:
                if self._device.type == "cuda":
                    torch.cuda.empty_cache()

    async def _group(self, server: Server, weights: dict[str, list]) -> _Group:
        identity, _ = await server.identity()
        if identity is None:
            raise SyncRefused(
                f"{UNCHANGED} {server.url}/metrics does not say when it was started; expected it to, because a broadcast to a "
                "server that has forgotten its group never ends. Start it without --disable-log-stats."
            )
        group = self._groups.get(server.url)
        if group is not None and (group.identity, group.weights) == (identity, weights):
            return group
        self._drop(server)
        # Somebody may have begun an update and been killed.
        with contextlib.suppress(SyncRefused, ServerUnavailable):
            await self._call(server, "/finish_weight_update", {})
        client = await _in_daemon_thread(lambda: self._connect(server.url, weights, self._timeout_s))
        group = self._groups[server.url] = _Group(client, identity, weights)
        try:
            await _in_daemon_thread(client.init_weight_transfer)
        except Exception as error:
            raise self._failure(server, error, _NO_GROUP, UNCHANGED) from error
        except BaseException:
            self._drop(server)
            raise
        return group

    def _failure(self, server: Server, error: Exception, final: re.Pattern, state: str = "") -> Exception:
        self._drop(server)
        why = f"{error} ({error.__cause__})" if error.__cause__ is not None else str(error)
        if final.search(why):
            return SyncRefused(
                f"{state} {server.url} takes no weights over NCCL: {why} It must be started with VLLM_SERVER_DEV_MODE=1 in "
                f"its environment and {self._flag}, on another GPU than the learner's first, and with the vLLM and NCCL of "
                "the trainer's environment.".lstrip()
            )
        return ServerUnavailable(f"{server.url} did not get the weights over NCCL: {why}", down=True)

    def _drop(self, server: Server) -> None:
        if (group := self._groups.pop(server.url, None)) is not None:
            group.close()

    def _check_room(self, wanted: int) -> None:
        """What fails for want of memory in the middle leaves a server that waits for ever."""
        if self._device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self._device)
        if free < wanted:
            raise SyncRefused(
                f"{UNCHANGED} the learner's GPU has {free / 1e9:.1f} GB free, and sending weights over NCCL takes up to "
                f"{wanted / 1e9:.1f} GB. Lower max_microbatch_tokens, set gradient_checkpointing, fsdp or lora_rank, or "
                "set weight_sync to file."
            )


class _Tensors:
    """The tensors of a policy file on a device, one after another.

    Attributes:
        error: Why there are no more of them, if not all were given.
    """

    def __init__(self, policy: Path, names: list[str], device: torch.device) -> None:
        self.error: Exception | None = None
        self._all = self._read(policy, names, device)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._all)

    def _read(
        self, policy: Path, names: list[str], device: torch.device
    ) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with safe_open(policy, "pt") as file:
                for name in names:
                    yield name, file.get_tensor(name).to(device)
        except Exception as error:
            self.error = error
            raise


def _announced(policy: Path) -> tuple[dict[str, list], int]:
    """Names, types and shapes of a policy file's tensors, in the order in which they are sent; bytes of a buffer."""
    try:
        with safe_open(policy, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            weights = {
                "names": list(slices),
                "dtype_names": [_DTYPES[part.get_dtype()] for part in slices.values()],
                "shapes": [list(part.get_shape()) for part in slices.values()],
            }
    except (OSError, SafetensorError, KeyError) as error:
        raise SyncRefused(
            f"{UNCHANGED} the policy {policy} cannot be read ({error!r}); expected a safetensors file of floats."
        ) from error
    sizes = [
        math.prod(shape) * getattr(torch, dtype).itemsize
        for shape, dtype in zip(weights["shapes"], weights["dtype_names"])
    ]
    return weights, min(sum(sizes), _BUFFER_BYTES + max(sizes))


async def _watched(send: Callable[[], None], tensors: _Tensors) -> None:
    """Wait for TRL's client, which looks at errors of its own side only when the server has answered: never, then."""
    sent = asyncio.ensure_future(_in_daemon_thread(send))
    try:
        while not sent.done():
            await asyncio.wait({sent}, timeout=0.2)
            if tensors.error is not None and not sent.done():
                raise RuntimeError(
                    f"sending stopped half-way ({type(tensors.error).__name__}: {tensors.error}); the server waits for the "
                    "rest for ever and must be started anew"
                )
        sent.result()
    finally:
        sent.cancel()


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """The result of a call that may never end; such a one must not keep the process from ending."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="divopd-nccl", daemon=True).start()
    return await done


def _trl_client(url: str, weights: dict[str, list], timeout_s: float) -> Any:
    from trl.experimental.async_distillation import vllm_client, weight_transfer

    # Accelerate's loggers want a process group, which the explorer, being no rank, must not join.
    for module in (vllm_client, weight_transfer):
        module.logger = logging.getLogger(module.__name__)
    # Proxies of the environment are not meant for these servers, and TRL's client would ask them.
    host = urlsplit(url).hostname or ""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(dict.fromkeys([*filter(None, os.environ.get(name, "").split(",")), host]))
    client = vllm_client.VLLMClient(url, server_timeout=60.0)
    return weight_transfer.WeightTransferClient(client, weights, int(timeout_s))


def broadcast(config: Any, purpose: str = "train") -> NCCLSync:
    """The way ``weight_sync: nccl``.

    Raises:
        ConfigError: This machine or environment cannot do it.
    """
    found = [
        what
        for what, there in (
            ("no GPU", torch.cuda.is_available()),
            ("no vLLM in the trainer's environment", find_spec("vllm") is not None),
        )
        if not there
    ]
    if found:
        raise ConfigError(
            f"weight_sync is 'nccl', but there is {' and '.join(found)}; expected both, because weights are sent from the "
            "learner's GPU by vLLM's own code (pip install 'trl[vllm]==1.16.0'). Or set weight_sync to file, or train "
            "adapters (lora_rank)."
        )
    # Half of the time for a load, as the engine gives one server.
    return NCCLSync(config.load_timeout_s / 2)
