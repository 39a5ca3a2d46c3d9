"""`GoldExpert`: follows the oracle's path, and finds back to it after somebody else's turns."""

from __future__ import annotations

import re
from collections.abc import Callable

from divopd_gym.prompts.parsing import squeeze

__all__ = ["GoldExpert"]

_ROOM = re.compile(r"^This (?:room|outside location) is called the (.+?)\.", re.MULTILINE)
_MOVED = re.compile(r"^You (?:move|teleport) to the (.+?)\.")
_NOTHING_LEFT = "look around"


class GoldExpert:
    """Plays a gold path action by action.

    After a turn that is not its own it goes on where it was. Rooms that such turns led away from are walked back to
    first, and questions that they raised are answered by the first answer; what they did to things stays done, so the
    rest of the path may then fall short of the task.

    Args:
        path_of: the gold path of a task id, or None.
    """

    def __init__(self, path_of: Callable[[str], list[str] | None]):
        self._path_of = path_of
        self._path: list[str] = []
        self._next = 0
        self._room: str | None = None
        self._way_back: list[str] = []
        self._asked = False

    def reset(self, observation: str, info: dict) -> None:
        """Begin an episode."""
        self._path = list(self._path_of(info["task"]) or ())
        self._next = 0
        self._way_back = []
        self._asked = False
        found = _ROOM.search(observation)
        self._room = found[1] if found else None

    def act(self) -> str:
        """The next action of the path, or the way back to it; ``look around`` where there is no path or it ended."""
        if self._asked and not self._answering():
            return "0"
        if self._way_back:
            return f"go to {self._way_back[-1]}"
        return self._path[self._next] if self._next < len(self._path) else _NOTHING_LEFT

    def observe(self, action: str, observation: str, info: dict) -> None:
        """Take note of a turn, whosever it was."""
        expected = squeeze(action).lower() == squeeze(self.act()).lower()
        on_path = not self._way_back and not (self._asked and not self._answering())
        if expected and on_path:
            self._next = min(self._next + 1, len(self._path))
        elif on_path and self._answering() and self._next > 0:
            # The question went unanswered, so what raised it must be done again.
            self._next -= 1
        self._asked = bool(info.get("options"))
        moved = _MOVED.match(observation)
        if moved is None:
            return
        before, self._room = self._room, moved[1]
        if self._way_back and self._room == self._way_back[-1]:
            self._way_back.pop()
        elif not (expected and on_path) and before is not None and before != self._room:
            self._way_back.append(before)

    def _answering(self) -> bool:
        return self._next < len(self._path) and self._path[self._next].isdigit()
