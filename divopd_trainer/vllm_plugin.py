"""vLLM plug-in: adds the weight-transfer engine ``file`` to every vLLM process of an environment with divopd in it.

vLLM calls `register` through the entry point group ``vllm.general_plugins``, in each of its processes and possibly more
than once. A server then takes ``--weight-transfer-config '{"backend": "file"}'``.
"""

from __future__ import annotations

__all__ = ["BACKEND", "UNCHANGED", "register"]

BACKEND = "file"
"""Name of the weight-transfer engine."""

UNCHANGED = "Refused, weights are as before:"
"""Opens what a server says when it may go on serving."""


def register() -> None:
    """Make the engine known to vLLM; nothing heavy is imported before a server uses it."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        # An older vLLM without weight transfer still serves teachers.
        return
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "divopd_trainer.vllm_file", "FileWeightTransferEngine"
        )
