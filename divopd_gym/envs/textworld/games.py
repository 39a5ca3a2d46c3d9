"""Games of TextWorld's generators by family, difficulty and seed; compiled once and kept on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from divopd_gym.core import package_version
from divopd_gym.data import default_root
from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["FAMILIES", "Family", "check_game", "engine_lock", "game_file", "get_family", "open_game"]

_HEADER_BYTES = 64
_lock = threading.RLock()


def engine_lock() -> threading.RLock:
    """To be held in whatever calls TextWorld: its parsers and generators are the process's, not a game's."""
    return _lock


def _after_fork() -> None:
    # A thread that held it does not exist in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _challenge(module: str) -> Callable[[dict[str, Any], Any], Any]:
    def build(settings: dict[str, Any], options: Any) -> Any:
        import importlib

        return importlib.import_module(f"textworld.challenges.{module}").make(settings, options)

    return build


def _custom(settings: dict[str, Any], options: Any) -> Any:
    import textworld.generator

    for name, value in settings.items():
        setattr(options, name, value)
    return textworld.generator.make_game(options)


@dataclass(frozen=True)
class Family:
    """A generator.

    Attributes:
        name: how it is called.
        defaults: its settings, each with the value that it has unless another is given.
        build: makes the game from settings and TextWorld's options.
        fixed: settings that nobody chooses; "seed" stands for the game's seed.
    """

    name: str
    defaults: Mapping[str, int]
    build: Callable[[dict[str, Any], Any], Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, given: Mapping[str, int] | None) -> dict[str, int]:
        """All settings, with the given ones in place.

        Raises:
            ConfigError: an unknown setting, or one that is no number of at least 0.
        """
        given = dict(given or {})
        unknown = sorted(set(given) - set(self.defaults))
        if unknown:
            raise ConfigError(
                f"settings {unknown} of TextWorld's {self.name}; it has {', '.join(self.defaults)}"
            )
        for name, value in given.items():
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{self.name} setting {name}={value!r}; expected an integer of at least 0")
        return {name: int(given.get(name, value)) for name, value in self.defaults.items()}


FAMILIES = MappingProxyType(
    {
        family.name: family
        for family in (
            Family("coin_collector", {"level": 1}, _challenge("tw_coin_collector.coin_collector")),
            Family("treasure_hunter", {"level": 1}, _challenge("tw_treasure_hunter.treasure_hunter")),
            Family(
                "cooking",
                {"recipe": 1, "take": 1, "go": 1, "open": 0, "cook": 0, "cut": 0, "drop": 0},
                _challenge("tw_cooking.cooking"),
                {"split": None, "recipe_seed": "seed"},
            ),
            Family(
                "custom", {"nb_rooms": 2, "nb_objects": 4, "quest_length": 2, "quest_breadth": 1}, _custom
            ),
        )
    }
)
"""TextWorld's generators; see its documentation of each for what the settings mean."""


def get_family(name: str) -> Family:
    """A family by name.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in FAMILIES:
        raise ConfigError(f"TextWorld family {name!r}; choose from {', '.join(FAMILIES)}")
    return FAMILIES[name]


def game_file(family: Family, settings: Mapping[str, int], seed: int) -> Path:
    """The compiled game, from disk or made now (a second or two of CPU time).

    Args:
        family: its generator.
        settings: all settings of the family.
        seed: fixes everything else.

    Raises:
        ConfigError: the generator cannot make such a game.
        DataNotFoundError: textworld is not installed.
    """
    textworld = import_textworld()
    words = "-".join(f"{name}{value}" for name, value in settings.items())
    folder = default_root() / "textworld" / package_version("textworld") / family.name / words
    path = folder / f"{seed}.z8"
    if path.is_file() and path.with_suffix(".json").is_file():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataNotFoundError(
            f"games cannot be kept in {folder} ({error}); set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as making:
        options = textworld.GameOptions()
        options.seeds = seed
        options.path = os.path.join(making, path.name)
        fixed = {name: seed if value == "seed" else value for name, value in family.fixed.items()}
        try:
            game = family.build({**settings, **fixed}, options)
            textworld.generator.compile_game(game, options)
        except Exception as error:
            raise ConfigError(
                f"TextWorld's {family.name} made no game of {dict(settings)} with seed {seed}: "
                f"{type(error).__name__}: {error}. Choose other settings or another seed."
            ) from error
        # The game last: where it is, its description is.
        for suffix in (".json", ".z8"):
            shutil.move(Path(making) / f"{seed}{suffix}", path.with_suffix(suffix))
    return path


def check_game(path: Path) -> None:
    """See whether a file can be a Z-machine game: for what cannot, the interpreter ends the whole process.

    Its header (Z-Machine Standards 1.1, section 11) holds the version in byte 0 and the length in word 0x1A, in units
    that depend on the version.

    Raises:
        DataNotFoundError: the file is gone, too short, or no game.
    """
    remedy = "get the file again, or delete it if it is a generated one"
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataNotFoundError(f"the game {path} could not be read ({error}); {remedy}") from error
    version = head[0] if head else 0
    if len(head) < _HEADER_BYTES or not 1 <= version <= 8:
        raise DataNotFoundError(
            f"{path} is no Z-machine game: its {size} bytes begin with {head[:8]!r}; expected a header of "
            f"{_HEADER_BYTES} bytes with a version of 1 to 8 in front; {remedy}"
        )
    length = int.from_bytes(head[0x1A:0x1C], "big") * (2 if version <= 3 else 4 if version <= 5 else 8)
    if size < length:
        raise DataNotFoundError(
            f"the game {path} is cut short: it has {size} bytes; expected {length}, by its header; {remedy}"
        )


def open_game(path: Path, wanted: Any) -> Any:
    """Start the interpreter on a game.

    Args:
        path: the game.
        wanted: textworld.EnvInfos.

    Returns:
        TextWorld's environment, not yet reset.

    Raises:
        DataNotFoundError: the game, or the description beside it, is missing or damaged.
    """
    check_game(path)
    try:
        return import_textworld().start(str(path), wanted)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataNotFoundError(
            f"the description {path.with_suffix('.json')} of the game beside it could not be read "
            f"({type(error).__name__}: {error}); get both files again, or delete them if they are generated ones"
        ) from error


def import_textworld() -> Any:
    """The package textworld.

    Raises:
        DataNotFoundError: it is not installed.
    """
    try:
        import textworld
        import textworld.generator
    except ImportError as error:
        raise DataNotFoundError(
            f"TextWorld needs the package textworld, and importing it failed ({error}); install it with: "
            "pip install 'divopd[alfworld]'"
        ) from error
    return textworld
