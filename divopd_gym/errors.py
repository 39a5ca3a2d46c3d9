"""Every error of the project derives from `DivOPDError`; messages say what was found, expected, and the remedy."""

__all__ = [
    "ConfigError",
    "DataNotFoundError",
    "DivOPDError",
    "PoolError",
    "ResetNeeded",
    "WorkerDied",
    "WorkerTimeout",
]


class DivOPDError(Exception):
    """Base of every error of the project."""


class ConfigError(DivOPDError, ValueError):
    """A setting, argument or input file that cannot work."""


class DataNotFoundError(DivOPDError, RuntimeError):
    """Benchmark data that is not where it was looked for."""


class ResetNeeded(DivOPDError, RuntimeError):
    """An environment was used before `reset` or after its episode ended."""


class PoolError(DivOPDError, RuntimeError):
    """A worker of an environment pool failed."""


class WorkerDied(PoolError):
    """A worker process ended in the middle of a call."""


class WorkerTimeout(PoolError):
    """A worker process did not answer before its deadline."""
