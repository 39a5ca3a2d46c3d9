"""An ALFWorld player that searches: it knows only what it has read, and plays on from wherever it finds itself.

`SearchExpert` visits receptacles in turn, opens what is closed, takes the target when it sees it, treats it and puts
it down. It learns from the actions that were really executed, so it recovers from anybody's mistakes. The same texts
always give the same next action.
"""

from __future__ import annotations

import re

from divopd_gym.envs.alfworld.engine import NOTHING_HAPPENS
from divopd_gym.envs.alfworld.world import HOLDS, LAMP, LAMP_STANDS, OPENABLE

_THING = r"[a-z]+ \d+"
_ROOM = re.compile(r"Looking quickly around you, you see (.+?)\.")
_TASK = re.compile(r"Your task is to: (.+?)\.?\s*$", re.MULTILINE)
_SEEN = re.compile(rf"(?:On the ({_THING}), you see|The ({_THING}) is open\. In it, you see) (.+?)\.")
_CLOSED = re.compile(rf"The ({_THING}) is closed\.")
_ITEM = re.compile(rf"\ban? ({_THING})")
_FACING = re.compile(r"You are facing the (.+?)\. Next to it")
_CARRYING = re.compile(rf"You are carrying: an? ({_THING})")
_ACTIONS = {
    "go": re.compile(rf"go to ({_THING})"),
    "open": re.compile(rf"open ({_THING})"),
    "close": re.compile(rf"close ({_THING})"),
    "take": re.compile(rf"take ({_THING}) from ({_THING})"),
    "move": re.compile(rf"(?:move|put) ({_THING}) (?:to|in/on) ({_THING})"),
    "treat": re.compile(rf"(clean|heat|cool) ({_THING}) with ({_THING})"),
}
_GOALS = (
    ("two", r"(?:put two|find two) (?P<obj>[a-z]+) (?:and put them in|in) (?P<recep>[a-z]+)"),
    ("look", r"(?:look at|examine the) (?P<obj>[a-z]+) (?:under|with) the (?P<recep>[a-z]+)"),
    ("clean", r"(?:put a clean|clean some) (?P<obj>[a-z]+) (?:and put it in|in) (?P<recep>[a-z]+)"),
    ("heat", r"(?:put a hot|heat some) (?P<obj>[a-z]+) (?:and put it in|in) (?P<recep>[a-z]+)"),
    ("cool", r"(?:put a cool|cool some) (?P<obj>[a-z]+) (?:and put it in|in) (?P<recep>[a-z]+)"),
    ("put", r"put (?:a|some) (?P<obj>[a-z]+) (?:in|on) (?P<recep>[a-z]+)"),
)
_TOOL = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}
_OPENABLE = frozenset(kind.lower() for kind in OPENABLE)
_HOLDS = {kind.lower(): frozenset(o.lower() for o in held) for kind, held in HOLDS.items()}

_MAY_HOLD = {
    kind: held | {LAMP.lower()} if kind in {stand.lower() for stand in LAMP_STANDS} else held
    for kind, held in _HOLDS.items()
}


def _type(thing: str) -> str:
    return thing.rsplit(" ", 1)[0]


class SearchExpert:
    """A text-only expert for generated and real houses.

    Args:
        order: ``listed`` searches in the order in which the room text lists the receptacles; ``likely`` first visits
            those that usually hold such an object, which real rooms with their dozens of drawers need.
        wording: ``move`` (games of ALFWorld 0.4) or ``put`` (earlier ones: "put apple 1 in/on desk 1").

    Attributes:
        goal: what was understood of the task: (kind, object type, receptacle or lamp type), or None.
    """

    def __init__(self, order: str = "listed", wording: str = "move"):
        self.order = order
        self.wording = wording
        self.goal: tuple[str, str, str] | None = None
        self._forget()

    def _forget(self) -> None:
        self.receptacles: list[str] = []
        self.here: str | None = None
        self.holding: str | None = None
        self.contents: dict[str, tuple[str, ...]] = {}
        self.closed: set[str] = set()
        self.state: dict[str, set[str]] = {}
        self.refused: set[tuple[str, str]] = set()
        self.place: dict[str, int] = {}
        self.came_from: str | None = None
        self.read_at: dict[str, int] = {}

    # What is read.
    def reset(self, observation: str, info: dict) -> None:
        """Begin an episode.

        Args:
            observation: the room text, with or without the task sentence.
            info: only ``goal`` is read, and only when the observation has no task sentence.
        """
        self._forget()
        room = _ROOM.search(observation)
        self.receptacles = _ITEM.findall(room[1]) if room else []
        self.place = {name: number for number, name in enumerate(self.receptacles)}
        task = _TASK.search(observation)
        self.goal = _read_goal(task[1] if task else str(info.get("goal") or ""))

    def observe(self, action: str, observation: str, info: dict) -> None:
        """Take note of an action that was executed, whoever chose it, and of what the game answered.

        Args:
            action: the action as sent.
            observation: the game's answer.
            info: not read.
        """
        action = action.strip()
        if observation.strip().endswith(NOTHING_HAPPENS):
            self._failed(action)
        else:
            self._done(action)
        for match in _SEEN.finditer(observation):
            receptacle = match[1] or match[2]
            self.contents[receptacle] = tuple(_ITEM.findall(match[3]))
            self.closed.discard(receptacle)
            self.read_at[receptacle] = len(self.read_at) and 1 + max(self.read_at.values())
        for receptacle in _CLOSED.findall(observation):
            self.closed.add(receptacle)
        facing = _FACING.search(observation)
        if facing:
            together = re.findall(_THING, facing[1])
            self.here = together[0] if together else self.here
            for other in together[1:]:
                self._same_place(together[0], other)
        carrying = _CARRYING.search(observation)
        if carrying:
            self.holding = carrying[1]

    def _done(self, action: str) -> None:
        if match := _ACTIONS["go"].fullmatch(action):
            self.here = match[1]
        elif match := _ACTIONS["open"].fullmatch(action):
            self.closed.discard(match[1])
        elif match := _ACTIONS["close"].fullmatch(action):
            self.closed.add(match[1])
        elif match := _ACTIONS["take"].fullmatch(action):
            thing, receptacle = match.groups()
            self.holding, self.came_from = thing, receptacle
            for name, inside in self.contents.items():
                self.contents[name] = tuple(t for t in inside if t != thing)
        elif match := _ACTIONS["move"].fullmatch(action):
            thing, receptacle = match.groups()
            self.holding = None
            inside = self.contents.get(receptacle)
            if inside is not None:
                self.contents[receptacle] = (*inside, thing)
        elif match := _ACTIONS["treat"].fullmatch(action):
            state = self.state.setdefault(match[2], set())
            state.discard({"heat": "cool", "cool": "heat"}.get(match[1], ""))
            state.add(match[1])

    def _failed(self, action: str) -> None:
        match = _ACTIONS["go"].fullmatch(action)
        if match and match[1] in self.place and self.here is not None:
            # A known receptacle that one cannot go to stands where one already is.
            self._same_place(self.here, match[1])
            return
        match = _ACTIONS["move"].fullmatch(action)
        if match and match[1] == self.holding and self._at(match[2]) and match[2] not in self.closed:
            self.refused.add((match[1], match[2]))

    def _same_place(self, one: str, other: str) -> None:
        if one in self.place and other in self.place and self.place[one] != self.place[other]:
            old, new = self.place[other], self.place[one]
            self.place = {name: new if number == old else number for name, number in self.place.items()}

    def _at(self, receptacle: str) -> bool:
        if self.here is None:
            return False
        return receptacle == self.here or self.place.get(receptacle, -1) == self.place.get(self.here, -2)

    # What is done.
    def act(self) -> str:
        """The next action; asking again gives the same one."""
        if self.goal is None:
            return "look"
        kind, wanted, destination = self.goal
        if self.holding is not None and _type(self.holding) != wanted:
            return self._put_away()
        if kind == "look":
            return self._look(wanted, destination)
        if self.holding is None:
            return self._fetch(wanted)
        if kind in _TOOL and kind not in self.state.get(self.holding, ()):
            return self._treat(kind)
        return self._deliver(destination)

    def _treat(self, verb: str) -> str:
        tools = [r for r in self.receptacles if _type(r) == _TOOL[verb]]
        if not tools:
            return "look"
        tool = next((t for t in tools if self._at(t)), tools[0])
        return f"{verb} {self.holding} with {tool}" if self._at(tool) else f"go to {tool}"

    def _deliver(self, destination: str) -> str:
        goals = [r for r in self.receptacles if _type(r) == destination]
        open_to = [r for r in goals if (self.holding, r) not in self.refused] or goals
        if not open_to:
            return "look"
        kind, wanted, _ = self.goal
        if kind == "two":
            # Both must end in the same receptacle: the one that already has most of them.
            goal = max(open_to, key=lambda r: len(self._settled(r, wanted)))
        else:
            goal = next((r for r in open_to if self._at(r)), open_to[0])
        return self._put(goal)

    def _reach(self, receptacle: str) -> str | None:
        """The next action towards standing before an open receptacle, None when there."""
        if not self._at(receptacle):
            return f"go to {receptacle}"
        return f"open {receptacle}" if receptacle in self.closed else None

    def _put(self, receptacle: str) -> str:
        on_the_way = self._reach(receptacle)
        if on_the_way:
            return on_the_way
        if receptacle not in self.contents:
            return f"examine {receptacle}"
        if self.wording == "put":
            return f"put {self.holding} in/on {receptacle}"
        return f"move {self.holding} to {receptacle}"

    def _put_away(self) -> str:
        """Get rid of something that is not wanted, here if possible."""
        nearby = [r for r in self.receptacles if self._at(r)]
        kind = _type(self.holding)
        likely = [r for r in self.receptacles if kind in _HOLDS.get(_type(r), ())]
        order = [r for r in nearby if r == self.came_from or r in likely]
        order += [self.came_from] if self.came_from else []
        order += [*likely, *nearby, *self.receptacles]
        for receptacle in order:
            if (self.holding, receptacle) not in self.refused:
                return self._put(receptacle)
        return "look"

    def _settled(self, receptacle: str, wanted: str) -> list[str]:
        if self.goal[0] != "two" or _type(receptacle) != self.goal[2]:
            return []
        return [t for t in dict.fromkeys(self.contents.get(receptacle, ())) if _type(t) == wanted]

    def _fetch(self, wanted: str) -> str:
        """Take a target that is in sight or known, or go on searching."""
        kept: set[str] = set()
        if self.goal[0] == "two":
            goals = [r for r in self.receptacles if _type(r) == self.goal[2]]
            best = max(goals, key=lambda r: len(self._settled(r, wanted)), default=None)
            kept = set(self._settled(best, wanted)) if best else set()
        known = [
            (receptacle, thing)
            for receptacle in self.receptacles
            for thing in self.contents.get(receptacle, ())
            if _type(thing) == wanted and thing not in kept
        ]
        # Something treated already is the best; then what is at hand; then the first in the room's order.
        known.sort(key=lambda rt: (self.goal[0] not in self.state.get(rt[1], ()), not self._at(rt[0])))
        if known:
            receptacle, thing = known[0]
            return self._reach(receptacle) or f"take {thing} from {receptacle}"
        return self._search(wanted)

    def _look(self, wanted: str, lamp: str) -> str:
        if self.holding is None:
            return self._fetch(wanted)
        lamps = [(r, t) for r in self.receptacles for t in self.contents.get(r, ()) if _type(t) == lamp]
        if not lamps:
            return self._search(lamp)
        receptacle, thing = next(((r, t) for r, t in lamps if self._at(r)), lamps[0])
        return f"use {thing}" if self._at(receptacle) else f"go to {receptacle}"

    def _search(self, wanted: str) -> str:
        for receptacle in self.receptacles:
            if self._at(receptacle) and receptacle not in self.contents:
                return self._reach(receptacle) or f"examine {receptacle}"
        left = [r for r in self.receptacles if r not in self.contents]
        if left:
            return f"go to {self._first(left, wanted)}"
        # Everything was seen and nothing fits: something moved unseen. Look again where it is longest ago.
        oldest = min(self.receptacles, key=lambda r: self.read_at.get(r, -1), default=None)
        if oldest is None:
            return "look"
        return self._reach(oldest) or f"examine {oldest}"

    def _first(self, left: list[str], wanted: str) -> str:
        if self.order == "listed":
            return left[0]
        return min(left, key=lambda r: (self._cost(r, wanted), self.receptacles.index(r)))

    def _cost(self, receptacle: str, wanted: str) -> int:
        """How late to look there: last where such a thing never lies, later where one has to open."""
        kind = _type(receptacle)
        return 2 * (wanted not in _MAY_HOLD.get(kind, ())) + (kind in _OPENABLE)


def _read_goal(sentence: str) -> tuple[str, str, str] | None:
    for kind, pattern in _GOALS:
        match = re.fullmatch(pattern, sentence.strip().lower())
        if match:
            return kind, match["obj"], match["recep"]
    return None
