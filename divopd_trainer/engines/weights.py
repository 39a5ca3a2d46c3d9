"""Hand-over of policy weights through files: written whole or not at all, loaded in place, checked by name and shape.

Tied weights are written once. A file whose names or shapes differ from the model's is refused, because a silently
skipped tensor would leave old weights behind a rising version.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from divopd_gym.errors import DivOPDError

__all__ = ["WeightsError", "load_policy", "read_policy", "write_policy"]

# Parts of a name that wrappers add at any depth; distributed data parallel adds `module.` in front.
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.")


class WeightsError(DivOPDError, ValueError):
    """Weights that do not belong to the model, or a file that cannot be read."""


def write_policy(
    named_tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    directory: str | Path,
    version: int,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write one policy version; a reader sees the whole file or none.

    Args:
        named_tensors: Parameters, as of ``model.named_parameters()`` or ``model.state_dict()``. In a mapping a
            tensor under several names (tied weights) is written once, under the first.
        directory: Where; made if absent.
        version: Completed updates.
        dtype: Convert to this type; None keeps each tensor's own.

    Returns:
        The file's path.
    """
    # Only in a mapping are all tensors alive at once; of an iterator's, a freed one's address may be used again.
    once = isinstance(named_tensors, Mapping)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
        tensor = tensor.detach()
        if once and tensor.numel():
            # Views of one storage may start at the same place with another shape; those are not the same weights.
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if identity in seen:
                continue
            seen.add(identity)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        # A copy, because safetensors refuses tensors that share a storage.
        tensors[_plain(name)] = tensor.to("cpu", wanted, copy=True).contiguous()
    path = Path(directory) / f"policy-{version:08d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".policy-", dir=path.parent)
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"format": "pt", "policy_version": str(version)})
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def read_policy(path: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a policy file, or of a model directory's safetensors files, on the CPU.

    Raises:
        WeightsError: Nothing readable is there.
    """
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise WeightsError(
            f"No safetensors file in {path}; expected the directory of a saved model or a policy file."
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"The weights file {file} cannot be read ({error}). It may have been deleted as too old; keep the "
                "files of all versions that are still asked for."
            ) from error
    return tensors


@torch.no_grad()
def load_policy(model: Any, source: str | Path | Mapping[str, torch.Tensor]) -> int:
    """Copy weights into a model in place.

    Every parameter of the model must be given (one name is enough for tied ones), and nothing else; nothing is
    changed if anything is amiss.

    Args:
        model: A causal LM.
        source: What `read_policy` takes, or its result.

    Returns:
        How many distinct tensors were written.

    Raises:
        WeightsError: Names or shapes differ; the message lists them.
    """
    given = read_policy(source) if isinstance(source, (str, Path)) else source
    given = {_plain(name): tensor for name, tensor in given.items()}
    aliases: dict[int, list[str]] = {}
    parameters: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    known = {name for names in aliases.values() for name in names}
    extra = sorted(set(given) - known - {name for name, _ in model.named_buffers()})
    missing = [names[0] for names in aliases.values() if not any(name in given for name in names)]
    shapes = [
        f"{name}: given {tuple(given[name].shape)}, expected {tuple(parameters[key].shape)}"
        for key, names in aliases.items()
        for name in names
        if name in given and given[name].shape != parameters[key].shape
    ]
    # An untied head beside a tied model would be dropped without a word.
    untied = [
        f"{names[0]} and {name} differ, but are one tensor in this model"
        for names in aliases.values()
        for name in names[1:]
        if name in given and names[0] in given and not torch.equal(given[name], given[names[0]])
    ]
    if missing or extra or shapes or untied:
        parts = [
            f"{len(items)} {what} ({', '.join(items[:5])}{', ...' if len(items) > 5 else ''})"
            for what, items in (
                ("missing", missing),
                ("unknown", extra),
                ("of another shape", shapes),
                ("wrongly tied", untied),
            )
            if items
        ]
        raise WeightsError(
            f"The weights do not fit the model {type(model).__name__}: {'; '.join(parts)}. Learner and engine must "
            "be built from the same checkpoint."
        )
    for key, names in aliases.items():
        name = next(n for n in names if n in given)
        parameters[key].copy_(given[name])
    return len(aliases)


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")
