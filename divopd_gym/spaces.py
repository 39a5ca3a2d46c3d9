"""`TextSpace`: any Unicode text up to a length, usable in sync and async vector environments."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector.utils.shared_memory import (
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)

from divopd_gym.errors import ConfigError

# Ranges of code points that samples are drawn from: no surrogates, which are no characters.
_RANGES = ((0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x4E00, 0x9FFF), (0x1F300, 0x1F650))


class TextSpace(gymnasium.Space[str]):
    """All texts of at most `max_length` characters, of any script; the empty text too.

    `gymnasium.spaces.Text` needs its alphabet listed; a game's or a model's text has none.

    Args:
        max_length: most characters a text may have.
        seed: seed of `sample`.

    Raises:
        ConfigError: `max_length` is not positive.
    """

    def __init__(self, max_length: int = 65536, *, seed: int | np.random.Generator | None = None):
        if max_length < 1:
            raise ConfigError(f"TextSpace(max_length={max_length}); it must be at least 1 character")
        self.max_length = int(max_length)
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts differ in length."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A random text of at most 40 characters.

        Args:
            mask: must be None; texts cannot be masked.
            probability: must be None.

        Raises:
            ConfigError: a mask or probabilities were given.
        """
        if mask is not None or probability is not None:
            raise ConfigError("TextSpace.sample takes neither mask nor probability; leave both out")
        length = int(self.np_random.integers(0, min(self.max_length, 40) + 1))
        ranges = self.np_random.integers(0, len(_RANGES), size=length)
        return "".join(chr(int(self.np_random.integers(*_RANGES[r]))) for r in ranges)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def to_jsonable(self, sample_n: Sequence[str]) -> list[str]:
        """The texts themselves."""
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        """The texts themselves."""
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and self.max_length == other.max_length

    def __hash__(self) -> int:
        return hash((TextSpace, self.max_length))

    def __repr__(self) -> str:
        return f"TextSpace({self.max_length})"


# Gymnasium's vector environments find their helpers by the space's type. In shared memory a text is its length,
# then its code points.
@create_shared_memory.register(TextSpace)
def _create(space: TextSpace, n: int = 1, ctx: Any = None):
    import multiprocessing

    return (ctx or multiprocessing).Array(ctypes.c_int32, n * (space.max_length + 1))


@write_to_shared_memory.register(TextSpace)
def _write(space: TextSpace, index: int, value: str, shared_memory: Any) -> None:
    size = space.max_length + 1
    slot = np.frombuffer(shared_memory.get_obj(), dtype=np.int32)[index * size : (index + 1) * size]
    points = np.frombuffer(value.encode("utf-32-le", "surrogatepass"), dtype=np.int32)
    slot[0] = len(points)
    slot[1 : 1 + len(points)] = points


class _SharedTexts(Sequence[str]):
    """The texts in shared memory as they are now; a deep copy of it is a plain tuple.

    Gymnasium reads the shared memory once and copies what it got at every turn, so this must be a live view.
    """

    def __init__(self, slots: np.ndarray):
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return tuple(self)[index]
        slot = self._slots[index]
        return slot[1 : 1 + slot[0]].tobytes().decode("utf-32-le", "surrogatepass")

    def __deepcopy__(self, memo: dict) -> tuple[str, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return repr(tuple(self))


@read_from_shared_memory.register(TextSpace)
def _read(space: TextSpace, shared_memory: Any, n: int = 1) -> Sequence[str]:
    return _SharedTexts(
        np.frombuffer(shared_memory.get_obj(), dtype=np.int32).reshape(n, space.max_length + 1)
    )
