"""The engine that plays ALFWorld games: one simulator per process, shared by any number of sessions.

Fast Downward's library holds exactly one running game, and every further copy of it would leave a file of 33 MB in
the temporary folder. So a process loads the library once, from where it is installed, and a session whose turn it is
puts its own game back by loading it and replaying its operators (a tenth of a millisecond for a tiny house, some for a
large one). One lock per process makes that safe from several threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from divopd_gym.envs.alfworld.grammar import (
    GOAL_MARK,
    Context,
    Entity,
    FactBase,
    Grammar,
    entity_names,
    parse_grammar,
    split_goal,
)
from divopd_gym.envs.alfworld.translate import Translation, translate
from divopd_gym.errors import DataNotFoundError

NOTHING_HAPPENS = "Nothing happens."
_NAME_BYTES = 1024


@dataclass(frozen=True)
class GameSource:
    """A game as text, from a file of the benchmark or made on the spot.

    Attributes:
        domain: PDDL domain.
        problem: PDDL problem.
        grammar: twl2 grammar, with the goal sentence in it.
        walkthrough: a stored winning list of actions, or None.
    """

    domain: str
    problem: str
    grammar: str
    walkthrough: tuple[str, ...] | None = None

    @classmethod
    def from_json(cls, data: Mapping) -> GameSource:
        """Read the object that a ``game.tw-pddl`` file holds.

        Raises:
            KeyError: a part is missing.
        """
        walkthrough = data.get("walkthrough")
        return cls(
            data["pddl_domain"],
            data["pddl_problem"],
            data["grammar"],
            tuple(walkthrough) if walkthrough else None,
        )


@dataclass(frozen=True)
class Reply:
    """What the engine says after a command.

    Attributes:
        text: the feedback.
        won: whether the goal holds now (not latched: it can stop holding).
        admissible: the commands that would do something now, sorted.
        understood: whether the command was one of the admissible ones.
    """

    text: str
    won: bool
    admissible: tuple[str, ...]
    understood: bool


class _Operator(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("name", ctypes.c_char * _NAME_BYTES), ("effects", ctypes.c_int)]


class _Atom(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char * _NAME_BYTES)]


@dataclass(frozen=True)
class _Command:
    """One grounded operator as a player sees it."""

    operator: int
    effects: int
    action: str
    bound: tuple[tuple[tuple[str, str], str], ...]
    text: str


class Engine:
    """The process's simulator. Use `engine()`; never make one yourself."""

    def __init__(self):
        self.lock = threading.RLock()
        self._library = _load_library()
        self._running: Session | None = None

    def start(self, source: GameSource) -> Session:
        """Begin a game.

        Args:
            source: the game; what was parsed and translated for it is remembered for the next time.
        """
        with self.lock:
            return Session(self, source)

    def forget(self) -> None:
        """Let the next session load its game again, as after a fork in the middle of a turn."""
        self._running = None

    # What is below is called by sessions, under the lock.
    def _focus(self, session: Session) -> ctypes.CDLL:
        if self._running is not session:
            self._running = None
            self._library.load_sas(session.translation.sas)
            for operator, effects in session.played:
                self._library.apply_operator(operator, (_Atom * effects)())
            self._running = session
        return self._library


class Session:
    """One running game."""

    def __init__(self, engine: Engine, source: GameSource):
        self._engine = engine
        grammar, goal = split_goal(source.grammar)
        self.grammar: Grammar = parse_grammar(grammar)
        self.translation: Translation = translate(source.domain, source.problem)
        self.played: list[tuple[int, int]] = []
        library = engine._focus(self)
        self._facts = FactBase(self.translation.types)
        for predicate, arguments in self.translation.facts:
            self._facts.add(predicate, arguments)
        atoms = (_Atom * library.get_state_size())()
        library.get_state(atoms)
        for atom in atoms:
            predicate, arguments = _parse_atom(atom.name)
            if not predicate.startswith("not_"):
                self._facts.add(predicate, arguments)
        self._entities = {id: Entity(id, self.translation.types[id]) for id in self._facts.entities()}
        for id, name in entity_names(list(self._entities)).items():
            self._entities[id].name = name
        self._known: dict[int, _Command] = {}
        self._commands: dict[str, _Command] = {}
        text = self.grammar.rule("intro", Context(self._facts, self._entities))
        self.walkthrough = source.walkthrough and tuple(self._translated(a) for a in source.walkthrough)
        self.last = self._reply(text if goal is None else text.replace(GOAL_MARK, goal), understood=True)

    def step(self, command: str) -> Reply:
        """Send one command.

        Args:
            command: matched exactly against the admissible commands, after leading and trailing blanks are dropped;
                anything else is answered with "Nothing happens."
        """
        with self._engine.lock:
            found = self._commands.get(command.strip())
            if found is None:
                self.last = Reply(NOTHING_HAPPENS, self.last.won, self.last.admissible, False)
                return self.last
            library = self._engine._focus(self)
            effects = (_Atom * found.effects)()
            library.apply_operator(found.operator, effects)
            self.played.append((found.operator, found.effects))
            for effect in effects:
                self._facts.apply(*_parse_atom(effect.name))
            context = Context(self._facts, self._entities).extended(dict(found.bound))
            self.last = self._reply(self.grammar.feedback(found.action, context), understood=True)
            return self.last

    def _reply(self, text: str, understood: bool) -> Reply:
        library = self._engine._focus(self)
        operators = (_Operator * library.get_applicable_operators_count())()
        library.get_applicable_operators(operators)
        self._commands = {}
        for operator in operators:
            command = self._known.get(operator.id) or self._command(operator)
            self._commands.setdefault(command.text, command)
        return Reply(text, bool(library.check_goal()), tuple(sorted(self._commands)), understood)

    def _command(self, operator: _Operator) -> _Command:
        action, *arguments = operator.name.decode("cp1252").split()
        bound = tuple(zip(self.translation.parameters[action], arguments))
        wording = self.grammar.actions[action]
        text = self.grammar.command(action, Context(self._facts, self._entities).extended(dict(bound)))
        command = _Command(operator.id, operator.effects, action, bound, text)
        if "*" not in wording.queried and not wording.queried & self.translation.changing:
            self._known[operator.id] = command
        return command

    def _translated(self, action: str) -> str:
        """A stored action with raw PDDL ids replaced by the names a player sees."""
        if "_bar_" not in action:
            return action
        words = [
            self._entities[w.lower()].name.strip() if w.lower() in self._entities else w
            for w in action.split()
        ]
        return " ".join(words)


@functools.lru_cache(maxsize=4096)
def _parse_atom(raw: bytes) -> tuple[str, tuple[str, ...]]:
    """``b"NegatedAtom opened(drawer_1)"`` -> ("not_opened", ("drawer_1",))."""
    kind, rest = raw.decode("cp1252").split(" ", 1)
    predicate, _, arguments = rest.partition("(")
    values = tuple(a for a in arguments[:-1].split(", ") if a)
    return ("not_" + predicate if kind == "NegatedAtom" else predicate), values


def _load_library() -> ctypes.CDLL:
    try:
        import fast_downward.interface as interface
        import textworld  # noqa: F401  (fail here, with a remedy, rather than at the first grammar)
    except ImportError as error:
        raise DataNotFoundError(
            f"ALFWorld needs the packages alfworld and textworld, and importing them failed ({error}); "
            "install them with: pip install 'divopd[alfworld]'"
        ) from error
    library = ctypes.CDLL(str(interface.DOWNWARD_LIB_PATH))
    library.load_sas.argtypes, library.load_sas.restype = [ctypes.c_char_p], None
    library.get_applicable_operators_count.argtypes = []
    library.get_applicable_operators_count.restype = ctypes.c_int
    library.get_applicable_operators.argtypes = [ctypes.POINTER(_Operator)]
    library.get_applicable_operators.restype = None
    library.get_state_size.argtypes, library.get_state_size.restype = [], ctypes.c_int
    library.get_state.argtypes, library.get_state.restype = [ctypes.POINTER(_Atom)], None
    library.apply_operator.argtypes = [ctypes.c_int, ctypes.POINTER(_Atom)]
    library.apply_operator.restype = ctypes.c_int
    library.check_goal.argtypes, library.check_goal.restype = [], ctypes.c_bool
    return library


_engine: Engine | None = None
_engine_guard = threading.Lock()


def engine() -> Engine:
    """The process's one engine, loaded at the first call.

    Raises:
        DataNotFoundError: alfworld or textworld is not installed.
    """
    global _engine
    with _engine_guard:
        if _engine is None:
            _engine = Engine()
        return _engine


def _after_fork() -> None:
    # A lock held by another thread of the parent would never be released in the child.
    global _engine_guard
    _engine_guard = threading.Lock()
    if _engine is not None:
        _engine.lock = threading.RLock()
        _engine.forget()


os.register_at_fork(after_in_child=_after_fork)
