"""Two ways of bringing weights to a vLLM server: whole policies from files, and LoRA adapters.

Both name files that learner and server must both see: shared memory on one machine, a shared folder on several. After
each push whose policy has a probe beside it, the server must serve what was trained (`sync_probe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import Any

from divopd_trainer.engines.base import EngineError
from divopd_trainer.engines.http import Server, ServerRefusal, ServerUnavailable
from divopd_trainer.engines.sync_probe import check_served, read_probe
from divopd_trainer.vllm_plugin import BACKEND, UNCHANGED

__all__ = ["AdapterSync", "FileSync", "SyncRefused", "WholePolicySync", "adapters", "files"]

_CONTROL_S = 60.0
_TRANSFER_S = 1800.0


class SyncRefused(EngineError):
    """A server cannot take weights in this way, whatever is tried again."""


class WholePolicySync:
    """Whole policies: the server stands still while its weights are replaced, and has one version at a time.

    Attributes:
        backend: The server's weight-transfer engine.
        needs: What its environment must have for it, as part of a sentence.
        gaps: Differences between served and trained log-probs that were measured, in nats.
    """

    adapters = False
    backend = ""
    needs = ""

    def __init__(self) -> None:
        self.gaps: list[float] = []

    async def push(self, server: Server, source: Any, version: int, load: int) -> None:
        """Stop the server, replace its weights, let it go on, and compare.

        Raises:
            SyncRefused: It was not started for this, cannot read the weights, or has another model.
            SyncMismatch: It serves something else afterwards.
            ServerUnavailable: It does not answer.
        """
        # Requests of somebody else are called off rather than finished with other weights; ours are done.
        await self._call(server, "/pause?mode=abort")
        try:
            await self.transfer(server, Path(source).resolve(), version)
        except SyncRefused as error:
            # With half of the new weights it must not go on.
            if UNCHANGED in str(error):
                await self._call(server, "/resume")
            raise
        await self._call(server, "/resume")
        if (probe := await asyncio.to_thread(read_probe, source)) is not None:
            self.gaps.append(await check_served(server, probe, None))

    async def transfer(self, server: Server, policy: Path, version: int) -> None:
        """Replace the weights of a server that stands still; errors as of `push`."""
        raise NotImplementedError

    async def retire(self, server: Server, model: str) -> None:
        """Nothing is kept."""

    @property
    def _flag(self) -> str:
        return f"""--weight-transfer-config '{{"backend": "{self.backend}"}}'{self.needs}"""

    async def _call(self, server: Server, path: str, body: Any = None, timeout_s: float = _CONTROL_S) -> None:
        try:
            await server.post(path, body, timeout_s)
        except ServerRefusal as error:
            if error.status in (404, 405):
                raise SyncRefused(
                    f"{server.url} has no {path.partition('?')[0]} ({error.status}); it takes no weights while it runs. Start "
                    f"it with VLLM_SERVER_DEV_MODE=1 in its environment and {self._flag}."
                ) from error
            raise SyncRefused(str(error)) from error
        except ServerUnavailable as error:
            if "Weight transfer not configured" in str(error):
                raise SyncRefused(
                    f"{UNCHANGED} {server.url} was started without weight transfer. Start it with {self._flag}."
                ) from error
            if "Worker failed with error" in str(error):
                raise SyncRefused(str(error)) from error
            raise


class FileSync(WholePolicySync):
    """Whole policies through vLLM's weight-transfer engine ``file`` (see `divopd_trainer.vllm_file`)."""

    backend = BACKEND
    needs = ", with divopd installed in its environment"

    async def transfer(self, server: Server, policy: Path, version: int) -> None:
        """Have the server read the file."""
        await self._start(server)
        await self._call(server, "/update_weights", {"update_info": {"path": str(policy)}}, _TRANSFER_S)
        await self._call(server, "/finish_weight_update", {"weight_version": str(version)}, _TRANSFER_S)

    async def _start(self, server: Server) -> None:
        try:
            await self._call(server, "/start_weight_update")
        except SyncRefused as error:
            # Somebody began and was killed.
            if "already active" not in str(error):
                raise
            await self._call(server, "/finish_weight_update", {})
            await self._call(server, "/start_weight_update")


class AdapterSync:
    """LoRA adapters: a server holds several versions at once, each under a name of its own.

    Args:
        purpose: "train" or "eval"; part of the names.

    Attributes:
        gaps: See `WholePolicySync`.
    """

    adapters = True

    def __init__(self, purpose: str = "train") -> None:
        # A server that outlives a run must not answer with that run's adapter of the same number.
        self._name = f"divopd-{purpose}-{secrets.token_hex(4)}"
        self._held: dict[str, tuple[Path, set[str]]] = {}
        self.gaps: list[float] = []

    async def push(self, server: Server, source: Any, version: int, load: int) -> str:
        """Have the server load an adapter beside those it has, and compare.

        Args:
            server: Which.
            source: Folder with adapter_config.json and adapter_model.safetensors.
            version: Completed updates.
            load: See `WeightSync`.

        Returns:
            The name that requests give.

        Raises:
            SyncRefused: It takes no adapters, or not this one.
            SyncMismatch: It serves something else under the new name.
            ServerUnavailable: It does not answer.
        """
        model = f"{self._name}-{load}"
        folder = await asyncio.to_thread(self._hold, Path(source).resolve(), model)
        body = {"lora_name": model, "lora_path": str(folder), "load_inplace": False}
        try:
            await server.post("/v1/load_lora_adapter", body, _TRANSFER_S)
        except ServerRefusal as error:
            if "already been loaded" not in str(error):
                raise SyncRefused(_why_not(server, error)) from error
        except ServerUnavailable as error:
            # A wrong rank or shape is an internal error there.
            if not error.down and "rank" in str(error).lower():
                raise SyncRefused(_why_not(server, error)) from error
            raise
        self._held[model][1].add(server.url)
        if (probe := await asyncio.to_thread(read_probe, source)) is not None:
            self.gaps.append(await check_served(server, probe, model))
        return model

    async def retire(self, server: Server, model: str) -> None:
        """Free the slot, and the files when no server has them."""
        with contextlib.suppress(ServerRefusal):
            await server.post("/v1/unload_lora_adapter", {"lora_name": model}, _CONTROL_S)
        folder, servers = self._held.get(model, (None, set()))
        servers.discard(server.url)
        if folder is not None and not servers:
            self._held.pop(model, None)
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _hold(self, source: Path, model: str) -> Path:
        """Links to the files: the learner deletes its own, and a server that reads an adapter again must find them."""
        if model in self._held and self._held[model][0].is_dir():
            return self._held[model][0]
        folder, partial = source.with_name(model), Path(tempfile.mkdtemp(prefix=".held-", dir=source.parent))
        try:
            shutil.copytree(source, partial, copy_function=_link, dirs_exist_ok=True)
            with contextlib.suppress(OSError):
                # Another thread may have been faster.
                os.rename(partial, folder)
        except OSError as error:
            raise SyncRefused(f"The adapter {source} cannot be read ({error}); expected a folder.") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return self._held.setdefault(model, (folder, set()))[0]


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _why_not(server: Server, error: EngineError) -> str:
    return (
        f"{server.url} does not take the adapter: {error} It must be started with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in "
        "its environment, --enable-lora, --max-lora-rank of at least the adapter's, and must see its folder."
    )


def files(config: Any, purpose: str = "train") -> FileSync:
    """The way ``weight_sync: file``."""
    return FileSync()


def adapters(config: Any, purpose: str = "train") -> AdapterSync:
    """The way ``weight_sync: lora``."""
    return AdapterSync(purpose)
