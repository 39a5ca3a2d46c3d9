"""PDDL to the planner's SAS form, once per game: Fast Downward's translator, silent and memoised.

`sys.argv` and `sys.stdout` stay as they are; results are kept in a bounded cache. Not thread-safe (the
translator keeps its options in module globals): call it under the engine's lock.
"""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import io
import pickle
import pkgutil
import sys
from dataclasses import dataclass

from divopd_gym.errors import DataNotFoundError

# The settings under which TextWorld translates for play: nothing is pruned.
_OPTIONS = {
    "filter_unimportant_vars": False,
    "filter_unreachable_facts": False,
    "use_partial_encoding": False,
    "skip_variable_reordering": True,
    "add_implied_preconditions": False,
    "invariant_generation_max_candidates": 0,
}


@dataclass(frozen=True)
class Translation:
    """A game's problem, ready to be loaded into the simulator.

    Attributes:
        sas: the planning task as Fast Downward reads it.
        parameters: action name -> its parameters as (name, type).
        types: entity id -> type.
        facts: (predicate, arguments) of the initial state as the problem states it.
        changing: predicates that some action can change.
    """

    sas: bytes
    parameters: dict[str, tuple[tuple[str, str], ...]]
    types: dict[str, str]
    facts: tuple[tuple[str, tuple[str, ...]], ...]
    changing: frozenset[str]


@functools.lru_cache(maxsize=8)
def translate(domain: str, problem: str) -> Translation:
    """Translate one problem of a domain.

    Args:
        domain: text of the PDDL domain.
        problem: text of the PDDL problem.

    Returns:
        The translation; the last 8 are remembered (a large room takes a megabyte).

    Raises:
        DataNotFoundError: the problem is malformed.
    """
    modules = _translator()
    options = modules["options"]
    before = {key: getattr(options, key, None) for key in _OPTIONS}
    collecting = gc.isenabled()
    # The translator makes hundreds of thousands of live tuples; scanning them again and again is a fifth of the time.
    gc.disable()
    try:
        for key, value in _OPTIONS.items():
            setattr(options, key, value)
        problem_lists = modules["lisp_parser"].parse_nested_list(problem.split("\n"))
        task = modules["parsing_functions"].parse_task(pickle.loads(_domain_lists(domain)), problem_lists)
        modules["normalize"].normalize(task)
        sas_task = modules["translate"].pddl_to_sas(task)
        sas = io.StringIO()
        sas_task.output(sas)
    # The translator leaves the process on some malformed problems.
    except (Exception, SystemExit) as error:
        raise DataNotFoundError(
            f"the game's PDDL could not be translated ({type(error).__name__}: {error}); the file is damaged or of "
            "another domain: download the data again with `divopd data download alfworld`"
        ) from error
    finally:
        for key, value in before.items():
            setattr(options, key, value)
        if collecting:
            gc.enable()
    return Translation(
        sas=sas.getvalue().encode("utf-8"),
        parameters={
            a.name: tuple((p.name.strip("?"), p.type_name) for p in a.parameters) for a in task.actions
        },
        types={o.name: o.type_name for o in task.objects},
        facts=tuple(_facts(task.init)),
        changing=frozenset(e.literal.predicate for a in task.actions for e in a.effects),
    )


@functools.lru_cache(maxsize=4)
def _domain_lists(domain: str) -> bytes:
    # Pickled, because the translator may edit what it is given.
    return pickle.dumps(_translator()["lisp_parser"].parse_nested_list(domain.split("\n")))


def _facts(init):
    for atom in init:
        predicate = getattr(atom, "predicate", None)
        if predicate is not None:
            if predicate != "=":
                yield predicate, tuple(atom.args)
            continue
        # An assignment of a function: only symbolic, non-cost ones say something about the world.
        if atom.fluent.symbol != "total-cost" and not str(atom.expression.value).isdigit():
            yield str(atom.expression.value), tuple(atom.fluent.args)


def _silent_print(*values, file=None, **options) -> None:
    if file is not None:
        builtins.print(*values, file=file, **options)


@functools.lru_cache(maxsize=1)
def _translator() -> dict:
    # The translator's option module parses sys.argv when it is imported.
    argv = sys.argv
    sys.argv = ["translate.py", "domain", "task"]
    try:
        import fast_downward.translate as package

        modules = {
            name.rsplit(".", 1)[-1]: importlib.import_module(name)
            for name in [
                "fast_downward.translate.options",
                "fast_downward.translate.normalize",
                "fast_downward.translate.translate",
                "fast_downward.translate.pddl_parser.lisp_parser",
                "fast_downward.translate.pddl_parser.parsing_functions",
            ]
        }
    finally:
        sys.argv = argv
    # It reports its progress with print(); silencing that here spares swapping sys.stdout, which other threads use.
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = sys.modules.get(info.name)
        if module is not None:
            module.print = _silent_print
    return modules
