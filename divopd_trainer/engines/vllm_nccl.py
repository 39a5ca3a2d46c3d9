"""Whole policies broadcast to vLLM servers over NCCL, by TRL's weight-transfer client: no shared folder is needed.

The explorer, which runs beside the learner's main rank, reads the policy file and sends it from that rank's GPU. Each
server has a group of its own with it, so servers may come and go one by one. NCCL refuses a group with one GPU twice:
a student server must not run on the learner's first GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from divopd_gym.errors import ConfigError
from divopd_trainer.engines.http import Server, ServerUnavailable
from divopd_trainer.engines.vllm_sync import SyncRefused, WholePolicySync
from divopd_trainer.vllm_plugin import UNCHANGED

__all__ = ["NCCLSync", "broadcast"]

T = TypeVar("T")

_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# What TRL's client says of an answer that will not change.
_FINAL = re.compile(r"Request failed: (?!408|429|5\d\d)\d+|Weight transfer not configured")


@dataclass
class _Group:
    """A server's connection: the client, the server's life that it belongs to, and the weights that it announces."""

    client: Any
    identity: str | None
    weights: dict[str, list]


class NCCLSync(WholePolicySync):
    """Policies over NCCL (vLLM's weight-transfer engine ``nccl``).

    Args:
        timeout_s: Seconds for the handshake with a server, and for one transfer.
        device: Where tensors are sent from.
        connect: ``connect(url, weights, timeout_s)`` makes a client with the methods of TRL's `WeightTransferClient`;
            ``weights`` has the lists names, dtype_names and shapes.
    """

    backend = "nccl"

    def __init__(
        self,
        timeout_s: float = 1800.0,
        device: str = "cuda",
        connect: Callable[[str, dict[str, list], float], Any] | None = None,
    ) -> None:
        super().__init__()
        self._timeout_s, self._device = timeout_s, device
        self._connect = connect or _trl_client
        self._groups: dict[str, _Group] = {}

    async def transfer(self, server: Server, policy: Path, version: int) -> None:
        """Broadcast the file's tensors to a server, joined in a group anew if it is another one than the last time."""
        group = await self._group(server, await asyncio.to_thread(_announced, policy))
        tensors = _tensors(policy, group.weights["names"], self._device)
        await self._do(server, lambda: group.client.send_weights(tensors))

    async def _group(self, server: Server, weights: dict[str, list]) -> _Group:
        identity, _ = await server.identity()
        group = self._groups.get(server.url)
        # To a server that has forgotten its group a broadcast would never end.
        if (
            group is not None
            and identity is not None
            and (group.identity, group.weights) == (identity, weights)
        ):
            return group
        self._drop(server)
        # Somebody may have begun an update and been killed.
        with contextlib.suppress(SyncRefused, ServerUnavailable):
            await self._call(server, "/finish_weight_update", {})
        group = _Group(self._connect(server.url, weights, self._timeout_s), identity, weights)
        await self._do(server, group.client.init_weight_transfer, UNCHANGED)
        self._groups[server.url] = group
        return group

    async def _do(self, server: Server, work: Callable[[], Any], state: str = "") -> None:
        try:
            await _in_daemon_thread(work)
        except asyncio.CancelledError:
            # Whatever NCCL still waits for there, nobody will use that group again.
            self._groups.pop(server.url, None)
            raise
        except Exception as error:
            self._drop(server)
            why = f"{error} ({error.__cause__})" if error.__cause__ is not None else str(error)
            if _FINAL.search(why):
                raise SyncRefused(
                    f"{state} {server.url} takes no weights over NCCL: {why} Start it with VLLM_SERVER_DEV_MODE=1 in "
                    f"its environment and {self._flag}.".lstrip()
                ) from error
            raise ServerUnavailable(
                f"{server.url} did not get the weights over NCCL: {why}", down=True
            ) from error

    def _drop(self, server: Server) -> None:
        if (group := self._groups.pop(server.url, None)) is not None:
            group.client.destroy()


def _announced(policy: Path) -> dict[str, list]:
    """Names, types and shapes of a policy file's tensors, in the order in which they are sent."""
    try:
        with safe_open(policy, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                "names": list(slices),
                "dtype_names": [_DTYPES[part.get_dtype()] for part in slices.values()],
                "shapes": [list(part.get_shape()) for part in slices.values()],
            }
    except (OSError, SafetensorError, KeyError) as error:
        raise SyncRefused(
            f"{UNCHANGED} the policy {policy} cannot be read ({error!r}); expected a safetensors file of floats."
        ) from error


def _tensors(policy: Path, names: list[str], device: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(policy, "pt") as file:
        for name in names:
            yield name, file.get_tensor(name).to(device)


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
    return NCCLSync(float(config.load_timeout_s))
