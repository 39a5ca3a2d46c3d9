"""The text side of an ALFWorld game: a context-sensitive grammar evaluated over PDDL facts.

TextWorld's own parsers read the grammar, so the language is theirs; the evaluation here gives the same text
without parsing and deep-copying on every derivation. Parsed grammars are kept in a bounded cache: games that
differ only in their goal sentence share one.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType

# A grammar placeholder: (name, type). A value bound to it: the id of an entity.
Placeholder = tuple[str, str]
GOAL_MARK = "DIVOPD GOAL"
_GOAL = re.compile(r'("Your task is to: )([A-Za-z0-9 ,\'-]+)(\.")')


class Entity:
    """What grammar expressions such as ``o.indefinite + ' ' + o.name`` see of a thing in the world."""

    __slots__ = ("definite", "id", "indefinite", "name", "type")

    def __init__(self, id: str, type: str):
        self.id = id
        self.type = type
        self.name = id
        self.definite = "the"
        self.indefinite = "a"

    def __str__(self) -> str:
        return self.name


class FactBase:
    """The facts that hold, by predicate and argument types."""

    def __init__(self, types: Mapping[str, str]):
        """Start empty.

        Args:
            types: entity id -> type name.
        """
        self._types = types
        self._facts: dict[str, dict[tuple[str, ...], set[tuple[str, ...]]]] = defaultdict(dict)

    def add(self, predicate: str, arguments: tuple[str, ...]) -> None:
        """Make a fact hold."""
        types = tuple(self._types[a] for a in arguments)
        self._facts[predicate].setdefault(types, set()).add(arguments)

    def apply(self, predicate: str, arguments: tuple[str, ...]) -> None:
        """Make a fact hold and its negation (``not_`` in front) not hold."""
        types = tuple(self._types[a] for a in arguments)
        opposite = predicate[4:] if predicate.startswith("not_") else "not_" + predicate
        held = self._facts.get(opposite, {}).get(types)
        if held:
            held.discard(arguments)
        self._facts[predicate].setdefault(types, set()).add(arguments)

    def matching(self, predicate: str, types: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Arguments of the facts with these argument types, sorted."""
        return sorted(self._facts.get(predicate, {}).get(types, ()))

    def entities(self) -> list[str]:
        """Ids that occur in at least one fact, sorted."""
        found: set[str] = set()
        for by_type in self._facts.values():
            for group in by_type.values():
                for arguments in group:
                    found.update(arguments)
        return sorted(found)

    def copy(self) -> FactBase:
        """An independent copy."""
        other = FactBase(self._types)
        for predicate, by_type in self._facts.items():
            other._facts[predicate] = {types: set(group) for types, group in by_type.items()}
        return other


# A query is a conjunction of (predicate, placeholders).
Query = tuple[tuple[str, tuple[Placeholder, ...]], ...]


def assignments(
    query: Query, facts: FactBase, bound: Mapping[Placeholder, str]
) -> Iterator[dict[Placeholder, str]]:
    """All ways to bind a query's placeholders to entities, in sorted order of the facts.

    Two placeholders never share an entity, as in TextWorld.
    """
    mapping = dict(bound)
    used = set(mapping.values())

    def search(depth: int) -> Iterator[dict[Placeholder, str]]:
        if depth == len(query):
            yield dict(mapping)
            return
        predicate, placeholders = query[depth]
        for arguments in facts.matching(predicate, tuple(t for _, t in placeholders)):
            fresh: list[Placeholder] = []
            for placeholder, value in zip(placeholders, arguments):
                existing = mapping.get(placeholder)
                if existing is None:
                    if value in used:
                        break
                    mapping[placeholder] = value
                    used.add(value)
                    fresh.append(placeholder)
                elif existing != value:
                    break
            else:
                yield from search(depth + 1)
            for placeholder in fresh:
                used.discard(mapping.pop(placeholder))

    return search(0)


@dataclass
class Context:
    """What a derivation knows: the facts, the entities, and what the placeholders stand for."""

    facts: FactBase
    entities: Mapping[str, Entity]
    bound: dict[Placeholder, str] = field(default_factory=dict)
    variables: dict[str, Entity] = field(default_factory=dict)

    def extended(self, mapping: Mapping[Placeholder, str]) -> Context:
        """The same with more placeholders bound."""
        variables = dict(self.variables)
        variables.update({name: self.entities[value] for (name, _), value in mapping.items()})
        return Context(self.facts, self.entities, dict(mapping), variables)


@dataclass(frozen=True)
class _Text:
    text: str

    def derive(self, grammar: Grammar, context: Context) -> str:
        return self.text


@dataclass(frozen=True)
class _Rule:
    name: str

    def derive(self, grammar: Grammar, context: Context) -> str:
        return grammar.rule(self.name, context)


@dataclass(frozen=True)
class _Expression:
    source: str
    code: CodeType

    def derive(self, grammar: Grammar, context: Context) -> str:
        return str(eval(self.code, {"__builtins__": {}}, dict(context.variables)))


@dataclass(frozen=True)
class _Each:
    """One derivation of `inner` for every match of the query (a single one without a query)."""

    inner: _Text | _Rule | _Expression
    query: Query | None

    def each(self, grammar: Grammar, context: Context) -> list[str]:
        if self.query is None:
            return [self.inner.derive(grammar, context)]
        found = list(assignments(self.query, context.facts, context.bound))
        return [self.inner.derive(grammar, context.extended(mapping)) for mapping in found]

    def derive(self, grammar: Grammar, context: Context) -> str:
        return "".join(self.each(grammar, context))


@dataclass(frozen=True)
class _List:
    inner: _Each

    def derive(self, grammar: Grammar, context: Context) -> str:
        items = self.inner.each(grammar, context)
        if not items:
            return grammar.rule("list_empty", context)
        if len(items) == 1:
            return items[0]
        comma = grammar.rule("list_separator", context)
        last = grammar.rule("list_last_separator", context)
        return comma.join(items[:-1]) + last + items[-1]


_Symbol = _Text | _Rule | _Expression | _Each | _List


@dataclass(frozen=True)
class ActionText:
    """How one action reads: the command a player types and the wording of its outcome."""

    name: str
    template: tuple[_Symbol, ...]
    feedback: tuple[_Symbol, ...]
    queried: frozenset[str]
    """Predicates the command's own wording depends on."""


@dataclass
class Grammar:
    """A parsed grammar: rules by name and the actions' commands."""

    rules: dict[str, list[tuple[Query | None, tuple[_Symbol, ...]]]]
    actions: dict[str, ActionText]

    def rule(self, name: str, context: Context) -> str:
        """Derive the first rule of that name whose condition holds.

        Raises:
            KeyError: no such rule, or none that applies.
        """
        for condition, symbols in self.rules[name]:
            if condition is None or next(assignments(condition, context.facts, context.bound), None):
                return "".join([symbol.derive(self, context) for symbol in symbols])
        raise KeyError(f"no rule of {name!r} applies")

    def feedback(self, action: str, context: Context) -> str:
        """What the game says after an action."""
        return "".join([symbol.derive(self, context) for symbol in self.actions[action].feedback])

    def command(self, action: str, context: Context) -> str:
        """The command line of an action, e.g. ``take apple 1 from desk 2``."""
        text = "".join([symbol.derive(self, context) for symbol in self.actions[action].template])
        if "{" not in text:
            return text
        return text.format(**{name: entity.name for name, entity in context.variables.items()})


def split_goal(source: str) -> tuple[str, str | None]:
    """Take the goal sentence out of a grammar.

    Returns:
        The grammar with a mark in the sentence's place, and the sentence without its full stop; the grammar
        unchanged and None when there is no plain sentence (it is then parsed as it is).
    """
    found = _GOAL.findall(source)
    if len(found) != 1:
        return source, None
    return _GOAL.sub(lambda m: m[1] + GOAL_MARK + m[3], source), found[0][1]


@functools.lru_cache(maxsize=8)
def parse_grammar(source: str) -> Grammar:
    """Parse a grammar in TextWorld's twl2 form.

    Not thread-safe (the parsers are module globals of TextWorld): call it under the engine's lock.
    """
    from textworld.envs.pddl import logic

    actions, grammar = logic._parse_and_convert(source, rule_name="pddlStart")
    rules = {
        name: [
            (_query(rule.condition) if rule.condition else None, tuple(_symbol(s) for s in rule.rhs))
            for rule in alternatives
        ]
        for name, alternatives in grammar._rules.items()
    }
    return Grammar(rules, {name: _action(name, action) for name, action in actions.items()})


def _action(name: str, action) -> ActionText:
    from textworld.envs.pddl import textgen

    symbols = tuple(_symbol(s) for s in textgen._parse_and_convert(action.template, rule_name="symbols"))
    queried: set[str] = set()
    for symbol in symbols:
        inner = symbol.inner if isinstance(symbol, _List) else symbol
        if isinstance(inner, _Each) and inner.query is not None:
            queried.update(predicate for predicate, _ in inner.query)
        elif isinstance(inner, _Rule):
            queried.add("*")
    feedback = tuple(
        _symbol(s) for s in textgen._parse_and_convert(action.feedback_rule, rule_name="symbols")
    )
    return ActionText(name, symbols, feedback, frozenset(queried))


def _symbol(parsed) -> _Symbol:
    kind = type(parsed).__name__
    if kind == "TerminalSymbol":
        return _Text(str(parsed))
    if kind == "NonterminalSymbol":
        return _Rule(str(parsed))
    if kind == "EvalSymbol":
        source = str(parsed).strip()
        return _Expression(source, compile(source, "<grammar>", "eval"))
    if kind == "ConditionalSymbol":
        return _Each(_symbol(parsed.expression), _query(parsed.given) if parsed.given else None)
    if kind == "ListSymbol":
        return _List(_symbol(parsed.symbol))
    raise NotImplementedError(f"grammar symbol of kind {kind}")


@functools.lru_cache(maxsize=1024)
def _query(expression: str) -> Query:
    from textworld.logic import Rule

    rule = Rule.parse_conjunctive_query(expression)
    return tuple((p.name, tuple((a.name, a.type) for a in p.parameters)) for p in rule.preconditions)


def entity_names(ids: list[str]) -> dict[str, str]:
    """The names a player sees: ``apple_bar__plus_01_...`` becomes ``apple 2``.

    Things of one type are numbered in reverse order of their ids, as ALFWorld does; an id without a position
    keeps its own text and gets a trailing blank.
    """
    kinds: dict[str, str | None] = {}
    left: dict[str, int] = defaultdict(int)
    for id in sorted(ids):
        kind, mark, _ = id.partition("_bar_")
        if not mark:
            kinds[id] = None
            continue
        kinds[id] = kind + "basin" if "basin" in id else kind
        left[kinds[id]] += 1
    names = {}
    for id, kind in kinds.items():
        if kind is None:
            names[id] = _unescape(id) + " "
        else:
            names[id] = f"{_unescape(kind)} {left[kind]}"
            left[kind] -= 1
    return names


_ESCAPES = {"_bar_": "|", "_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}


def _unescape(text: str) -> str:
    for escaped, plain in _ESCAPES.items():
        text = text.replace(escaped, plain)
    return text
