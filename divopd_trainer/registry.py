"""Where the parts of a method are found by name: ours, those a user registers, and any "module:attribute".

A part belongs to a *seam*. `register` makes one known; the file it is written in is noted, so that the explorer's
process imports it too. Distributions may list modules under the entry point group ``divopd.plugins``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from divopd_gym.errors import ConfigError

__all__ = ["SEAMS", "build", "import_plugins", "known", "plugin_of", "plugins", "register", "resolve"]

SEAMS: dict[str, str] = {
    "controller": "who acts at a turn",
    "horizon": "how many turns a rollout may take",
    "composer": "which turns form a batch",
    "weighting": "how a row's tokens are weighted",
    "advantage": "how a token is scored",
    "review": "what happens to a finished rollout before the learner sees it",
}
"""Seam -> the question it answers."""

_BUILT_IN: dict[str, dict[str, str]] = {
    "controller": {
        "student": "divopd_trainer.controller:StudentOnly",
        "recovery": "divopd_trainer.controller:Recovery",
        "guided": "divopd_trainer.controller:GuidedOPD",
        "tcod-b2f": "divopd_trainer.controller:TCODB2F",
    },
    "horizon": {
        "fixed": "divopd_trainer.horizon:FixedHorizon",
        "tcod-f2b": "divopd_trainer.horizon:TCODF2B",
        "turnopd": "divopd_trainer.horizon:TurnOPDHorizon",
    },
    "composer": {},
    "weighting": {
        "uniform": "divopd_trainer.weighting:UniformWeighting",
        "turnopd": "divopd_trainer.weighting:TurnOPDWeighting",
        "guided": "divopd_trainer.weighting_methods:GuidedWeighting",
        "atod": "divopd_trainer.weighting_methods:ATODWeighting",
        "sage": "divopd_trainer.weighting_methods:SAGEWeighting",
        "retire": "divopd_trainer.weighting_methods:RetireWeighting",
    },
    "advantage": {
        "reverse-kl": "divopd_trainer.advantage:ReverseKL",
        "f-opd": "divopd_trainer.advantage:FOPD",
    },
    "review": {
        "sage": "divopd_trainer.explorer.review_sage:SAGEReview",
        "future-bridge": "divopd_trainer.explorer.review_bridge:FutureBridge",
    },
}
_registered: dict[str, dict[str, Any]] = {seam: {} for seam in SEAMS}
_plugins: list[str] = []
_entry_points_loaded = False
T = TypeVar("T", bound=Callable[..., Any])


def register(seam: str, name: str) -> Callable[[T], T]:
    """Class decorator: make a part known under a name, so that a preset can name it.

    Args:
        seam: One of `SEAMS`.
        name: Not taken by a part of ours.

    Raises:
        ConfigError: An unknown seam, or the name is taken.
    """
    _check_seam(seam)
    if name in _BUILT_IN[seam]:
        raise ConfigError(f"The {seam} {name!r} is one of divopd's own; register yours under another name.")

    def note(part: T) -> T:
        _registered[seam][name] = part
        note_plugin(part.__module__)
        return part

    return note


def note_plugin(module: str) -> None:
    """Remember a module that registers something; the explorer imports it at its start."""
    source = plugin_of(module)
    if source is not None and source not in _plugins:
        _plugins.append(source)


def plugin_of(module: str) -> str | None:
    """How another process can import a module: its name, or the path of a script; None for divopd's own."""
    if module.split(".")[0] in ("divopd_trainer", "divopd_gym"):
        return None
    if module.startswith("divopd_plugin_") or module in ("__main__", "__mp_main__"):
        return getattr(sys.modules.get(module), "__file__", None)
    return module


def plugins() -> list[str]:
    """Modules and files that registered something here, in order."""
    return list(_plugins)


def import_plugins(sources: Sequence[str]) -> None:
    """Import modules by name and scripts by path, once each.

    Raises:
        ConfigError: One cannot be imported; the message holds the first cause.
    """
    for source in sources:
        if source in _plugins and source != getattr(sys.modules.get("__main__"), "__file__", None):
            continue
        try:
            _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"The plug-in {source!r} cannot be imported ({type(error).__name__}: {error}); expected the name of "
                "a module on the Python path, or the path of a .py file."
            ) from error
        if source not in _plugins:
            _plugins.append(source)


def _import_file(path: Path) -> None:
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) and Path(main.__file__).resolve() == path.resolve():
        return
    # Two files of one name are two plug-ins.
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"divopd_plugin_{path.stem}_{digest}"
    if name in sys.modules:
        return
    if not path.is_file():
        raise ConfigError(f"There is no plug-in file {path}; check the path.")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def known(seam: str) -> list[str]:
    """Names of a seam's parts, ours first."""
    _check_seam(seam)
    return [*_BUILT_IN[seam], *_registered[seam]]


def resolve(seam: str, name: str) -> Any:
    """The class or function behind a name or a "module:attribute".

    Raises:
        ConfigError: Nothing is known by that name.
    """
    _check_seam(seam)
    if name in _registered[seam]:
        return _registered[seam][name]
    target = _BUILT_IN[seam].get(name, name if name.count(":") == 1 else None)
    if target is None:
        _load_entry_points()
        if name in _registered[seam]:
            return _registered[seam][name]
        raise ConfigError(
            f"Unknown {seam} {name!r}; expected one of {', '.join(known(seam))}, or 'module:name' of your own. A "
            "part registered in a script is known once the script is named in plugins."
        )
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"The {seam} {name!r} cannot be imported ({error}); expected 'module:name' on the Python path."
        ) from error


def build(
    seam: str, name: str, options: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None
) -> Any:
    """Make a part.

    Args:
        seam: One of `SEAMS`.
        name: See `resolve`.
        options: Its keyword arguments.
        facts: What is known of the run (updates, max_turns, seed, ...): given for parameters of that name which the
            options leave out.

    Raises:
        ConfigError: An unknown name or option, or one that is missing.
    """
    kind, options = resolve(seam, name), dict(options or {})
    parameters = inspect.signature(kind).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in options if key not in parameters]
    if unknown and not open_ended:
        raise ConfigError(
            f"The {seam} {name!r} has no option {', '.join(map(repr, unknown))}; it takes "
            f"{', '.join(parameters) or 'none'}."
        )
    given = {key: value for key, value in (facts or {}).items() if key in parameters}
    try:
        return kind(**{**given, **options})
    except TypeError as error:
        raise ConfigError(f"The {seam} {name!r}: {error}; its options are {', '.join(parameters)}.") from None


def _check_seam(seam: str) -> None:
    if seam not in SEAMS:
        raise ConfigError(f"There is no seam {seam!r}; expected one of {', '.join(SEAMS)}.")


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    import_plugins([point.value for point in entry_points(group="divopd.plugins")])
