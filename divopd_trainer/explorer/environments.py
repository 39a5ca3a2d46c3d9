"""The pools of environments that the explorer plays in."""

from __future__ import annotations

from typing import Any

from .config import ExplorerConfig
from .deadline import within
from .engines import import_factory

__all__ = ["ask_env", "make_pool"]


def make_pool(config: ExplorerConfig, env_kwargs: dict[str, Any], workers: int) -> Any:
    """An environment pool, not yet started, as ``config.pool`` says."""
    if config.pool not in ("processes", "ray"):
        return import_factory(config.pool, "pool")(config.env_id, env_kwargs, workers, config)
    more: dict[str, Any] = {}
    if config.max_worker_restarts is not None:
        more["max_restarts"] = config.max_worker_restarts
    if config.pool == "ray":
        from divopd_gym.ray_pool import RayEnvPool as Pool

        more["address"] = config.ray_address
    else:
        from divopd_gym.pool import EnvPool as Pool
    return Pool(
        config.env_id,
        env_kwargs,
        workers,
        step_timeout_s=config.step_timeout_s,
        reset_timeout_s=config.reset_timeout_s,
        recycle_after=config.recycle_after,
        **more,
    )


async def ask_env(config: ExplorerConfig, pool: Any, name: str) -> Any:
    """An attribute of the environment, or what its method of this name returns."""
    handle = await within(config.start_timeout_s, pool.acquire(), pool.release)
    try:
        return await within(config.reset_timeout_s, handle.call(name))
    finally:
        pool.release(handle)
