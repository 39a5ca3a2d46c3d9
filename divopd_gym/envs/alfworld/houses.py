"""Houses made on the spot: ALFWorld games from a seed, solvable by construction, without any download.

A `HouseFamily` says how large and how varied houses are; `make_house` turns a family, a task type and a seed into a
game. The same three give the same house always; the rules and texts are those inside the alfworld package.
"""

from __future__ import annotations

import functools
import importlib.util
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from divopd_gym.envs.alfworld.engine import GameSource
from divopd_gym.envs.alfworld.grammar import entity_names
from divopd_gym.envs.alfworld.world import (
    CLEANABLE,
    COOLABLE,
    DISHES,
    GOALS,
    HEATABLE,
    HOLDS,
    LAMP,
    LAMP_STANDS,
    OBJECT_TYPES,
    OPENABLE,
    RECEPTACLE_TYPES,
    REPEATED,
    TASK_TYPES,
    TOOLS,
    TREATABLE,
)
from divopd_gym.errors import ConfigError, DataNotFoundError

HELD_OUT_SEED = 1_000_000
"""Seeds below are for training, seeds from here on for validation; the two never meet."""


@dataclass(frozen=True)
class HouseFamily:
    """How the houses of a family look.

    Attributes:
        name: first part of the task ids; letters, digits, ``-`` and ``_``.
        receptacles: least and most receptacles in a house.
        objects: least and most objects in a house (the lamp of a look task comes on top).
        receptacle_types: types drawn from, ALFWorld's names (``CounterTop``).
        object_types: types drawn from (``Apple``).
        per_receptacle_type: most receptacles of one type, for the types of which rooms have several (drawers, shelves).
        per_object_type: most objects of one type (a two-object task always has two of its target).
        openable: whether cabinets, drawers and so on must be opened; False leaves everything in sight.
        wordings: 1 gives every task type one goal sentence, 2 both of the benchmark's.
        shared_places: chance that a cabinet or drawer stands at the same place as the one before it, as in the real
            rooms, where one cannot "go to" the other then.
        task_types: what may be asked in these houses.
        search: how the expert goes about: ``listed`` (in the order of the room text) or ``likely`` places first.

    Raises:
        ConfigError: an unknown type name or an empty range.
    """

    name: str
    receptacles: tuple[int, int] = (6, 8)
    objects: tuple[int, int] = (3, 5)
    receptacle_types: tuple[str, ...] = RECEPTACLE_TYPES
    object_types: tuple[str, ...] = OBJECT_TYPES
    per_receptacle_type: int = 1
    per_object_type: int = 1
    openable: bool = True
    wordings: int = 2
    shared_places: float = 0.0
    task_types: tuple[str, ...] = TASK_TYPES
    search: str = "listed"

    def __post_init__(self):
        if not re.fullmatch(r"[A-Za-z0-9_-]+", self.name):
            raise ConfigError(f"house family {self.name!r}: a name has letters, digits, '-' and '_' alone")
        for name in ("receptacles", "objects", "receptacle_types", "object_types", "task_types"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for label, given, known in (
            ("receptacle types", self.receptacle_types, RECEPTACLE_TYPES),
            ("object types", self.object_types, OBJECT_TYPES),
            ("task types", self.task_types, TASK_TYPES),
        ):
            unknown = sorted(set(given) - set(known))
            if unknown or not given:
                raise ConfigError(
                    f"house family {self.name!r}: {label} {unknown or 'are empty'}; choose from {', '.join(known)}"
                )
        for label, (low, high) in (("receptacles", self.receptacles), ("objects", self.objects)):
            if not 1 <= low <= high:
                raise ConfigError(
                    f"house family {self.name!r}: {label}={(low, high)} is no range; give (least, most), 1 or more"
                )
        if self.search not in ("listed", "likely"):
            raise ConfigError(f"house family {self.name!r}: search={self.search!r}; choose listed or likely")
        if self.wordings not in (1, 2):
            raise ConfigError(f"house family {self.name!r}: wordings={self.wordings}; it must be 1 or 2")


_ROOMS = [
    "CounterTop",
    "Cabinet",
    "Desk",
    "DiningTable",
    "Drawer",
    "Fridge",
    "GarbageCan",
    "Microwave",
    "Shelf",
    "SideTable",
    "SinkBasin",
]
FAMILIES: dict[str, HouseFamily] = {
    family.name: family
    for family in (
        HouseFamily(
            "tiny",
            receptacles=(4, 5),
            objects=(2, 3),
            receptacle_types=tuple(
                ["Cabinet", "CounterTop", "Desk", "Fridge", "Microwave", "Shelf", "SinkBasin"]
            ),
            object_types=tuple(["Apple", "Book", "Egg", "Mug", "Pen", "Plate"]),
            wordings=1,
        ),
        HouseFamily("small", (8, 12), (6, 10), tuple([*_ROOMS, "Dresser", "Sofa"]), per_receptacle_type=3),
        HouseFamily("medium", (12, 18), (12, 20), per_receptacle_type=5, per_object_type=3, search="likely"),
        HouseFamily(
            "large",
            (20, 30),
            (25, 40),
            per_receptacle_type=10,
            per_object_type=4,
            shared_places=0.3,
            search="likely",
        ),
    )
}
"""The families that come with the package, by name."""


@dataclass(frozen=True)
class House:
    """A generated game.

    Attributes:
        task_id: ``family/task type/seed``.
        source: the game for the engine; its walkthrough is the gold path.
        goal: the goal sentence, e.g. ``put a mug in shelf``.
        task_type: ALFWorld's name of the task type.
        target: type of the object asked for.
        destination: type of the receptacle (or the lamp) asked for.
    """

    task_id: str
    source: GameSource
    goal: str
    task_type: str
    target: str
    destination: str

    @property
    def gold_path(self) -> list[str]:
        """A shortest-by-construction list of actions that wins; it knows where things are."""
        return list(self.source.walkthrough or ())


def get_family(family: str | HouseFamily) -> HouseFamily:
    """Look a family up by name, or pass one through.

    Raises:
        ConfigError: no family of that name.
    """
    if isinstance(family, HouseFamily):
        return family
    if family not in FAMILIES:
        raise ConfigError(
            f"house family {family!r} is unknown; choose from {', '.join(FAMILIES)} or pass a HouseFamily"
        )
    return FAMILIES[family]


def task_ids(
    family: str | HouseFamily,
    num_tasks: int,
    subset: str = "train",
    task_types: tuple[str, ...] | None = None,
    first_seed: int = 0,
) -> list[str]:
    """Ids of generated tasks, the task types taking turns.

    Args:
        family: the family or its name.
        num_tasks: how many.
        subset: ``train`` or ``valid``; their seeds never meet.
        task_types: some of the family's, or None for all.
        first_seed: offset inside the subset.

    Raises:
        ConfigError: an unknown family, subset or task type, or more seeds than the training range holds.
    """
    family = get_family(family)
    types = tuple(task_types) if task_types is not None else family.task_types
    unknown = [t for t in types if t not in family.task_types]
    if unknown or not types:
        raise ConfigError(
            f"task types {unknown or list(types)} for house family {family.name!r}; "
            f"choose from {', '.join(family.task_types)}"
        )
    if subset not in ("train", "valid"):
        raise ConfigError(f"subset {subset!r} of generated houses; choose train or valid")
    if num_tasks < 1 or first_seed < 0 or (subset == "train" and first_seed + num_tasks > HELD_OUT_SEED):
        raise ConfigError(
            f"num_tasks={num_tasks}, first_seed={first_seed}: give at least one task and, for training, seeds below "
            f"{HELD_OUT_SEED}"
        )
    base = first_seed + (HELD_OUT_SEED if subset == "valid" else 0)
    return [f"{family.name}/{types[i % len(types)]}/{base + i}" for i in range(num_tasks)]


def is_seed(text: str) -> bool:
    """Whether a text is the seed of a house as an id names it: at most 18 digits, no needless zeros."""
    return re.fullmatch("0|[1-9][0-9]{0,17}", text) is not None


def house_from_id(task_id: str, family: HouseFamily | None = None) -> House:
    """Make the house of a task id.

    Args:
        task_id: ``family/task type/seed``.
        family: needed when the family is not one of `FAMILIES`.

    Raises:
        ConfigError: the id cannot be read or names something unknown.
    """
    parts = task_id.split("/")
    if len(parts) != 3 or not is_seed(parts[2]):
        raise ConfigError(
            f"task id {task_id[:200]!r} of a generated house; expected <family>/<task type>/<seed>, the seed a number "
            "of at most 18 digits"
        )
    if family is None or family.name != parts[0]:
        family = get_family(parts[0])
    return make_house(family, parts[1], int(parts[2]))


@functools.lru_cache(maxsize=1)
def _logic_files() -> tuple[str, str]:
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise DataNotFoundError(
            "the package alfworld, whose rules the generated houses use, is not installed; "
            "install it with: pip install 'divopd[alfworld]'"
        )
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    try:
        return (folder / "alfred.pddl").read_text(), (folder / "alfred.twl2").read_text()
    except OSError as error:
        raise DataNotFoundError(
            f"alfred.pddl and alfred.twl2 were looked for in {folder} and could not be read ({error}); "
            "reinstall alfworld==0.4.2"
        ) from error


@dataclass
class _Plan:
    """A house while it is being furnished: ids of receptacles and objects and where things lie."""

    rng: random.Random
    family: HouseFamily
    receptacles: list[str] = field(default_factory=list)
    objects: dict[str, str] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)

    def add_receptacle(self, kind: str) -> str:
        self.counts[kind] += 1
        stem, basin = (kind[: -len("Basin")], f"_bar_{kind}") if kind.endswith("Basin") else (kind, "")
        id = f"{stem}_bar_{self.counts[kind]:02d}{basin}"
        self.receptacles.append(id)
        return id

    def add_object(self, kind: str, receptacle: str) -> str:
        self.counts[kind] += 1
        id = f"{kind}_bar_{self.counts[kind]:02d}"
        self.objects[id] = receptacle
        return id

    def hosts(self, kind: str, banned: str = "") -> list[str]:
        return [r for r in self.receptacles if _kind(r) != banned and _may_hold(_kind(r), kind)]


def _kind(id: str) -> str:
    parts = id.split("_bar_")
    return parts[2] if len(parts) == 3 else parts[0]


def _may_hold(receptacle: str, kind: str) -> bool:
    return kind in HOLDS[receptacle] or (kind == LAMP and receptacle in LAMP_STANDS)


def _choices(family: HouseFamily, task_type: str) -> list[tuple[str, str]]:
    """(object, destination) pairs a task can ask for in this family, so that the object can lie elsewhere too."""
    stands = [r for r in family.receptacle_types if r in LAMP_STANDS]
    verb, tool = TOOLS.get(task_type, (None, None))
    pairs = []
    for kind in family.object_types:
        hosts = [r for r in family.receptacle_types if kind in HOLDS[r]]
        if task_type == "look_at_obj_in_light":
            if stands and hosts:
                pairs.append((kind, LAMP))
        elif tool is None or (tool in family.receptacle_types and kind in TREATABLE[verb]):
            pairs.extend((kind, goal) for goal in hosts if goal != tool and len(hosts) > 1)
    return pairs


@functools.lru_cache(maxsize=256)
def make_house(family: HouseFamily, task_type: str, seed: int) -> House:
    """Make one house.

    Args:
        family: what the house may look like.
        task_type: one of the family's task types.
        seed: any non-negative integer.

    Raises:
        ConfigError: the family does not know the task type, or nothing in it can be asked for.
    """
    if task_type not in family.task_types:
        raise ConfigError(
            f"task type {task_type!r} for house family {family.name!r}; choose from {', '.join(family.task_types)}"
        )
    rng = random.Random(f"{family.name}/{task_type}/{seed}")
    pairs = _choices(family, task_type)
    if not pairs:
        raise ConfigError(
            f"house family {family.name!r} has no object and receptacle for {task_type}; "
            "give it more object_types or receptacle_types (sink, microwave, fridge, somewhere for a lamp)"
        )
    target = rng.choice(sorted({kind for kind, _ in pairs}))
    destination = rng.choice([goal for kind, goal in pairs if kind == target])
    plan = _Plan(rng, family)
    _build(plan, task_type, target, destination)
    lamp = _furnish(plan, task_type, target, destination)
    wording = GOALS[task_type][rng.randrange(family.wordings)]
    goal = wording.format(obj=target.lower(), recep=destination.lower(), lamp=LAMP.lower())
    domain, grammar = _logic_files()
    source = GameSource(
        domain=domain,
        problem=_problem(plan, task_type, target, destination),
        grammar=grammar.replace("UNKNOWN GOAL", goal),
        walkthrough=tuple(_gold_path(plan, task_type, target, destination, lamp)),
    )
    return House(f"{family.name}/{task_type}/{seed}", source, goal, task_type, target, destination)


def _build(plan: _Plan, task_type: str, target: str, destination: str) -> None:
    rng, family = plan.rng, plan.family
    needed = [] if destination == LAMP else [destination]
    if destination == LAMP:
        needed.append(rng.choice([r for r in family.receptacle_types if r in LAMP_STANDS]))
    if task_type in TOOLS:
        needed.append(TOOLS[task_type][1])
    needed.append(rng.choice([r for r in family.receptacle_types if target in HOLDS[r] and r != destination]))
    drawn = Counter(dict.fromkeys(needed, 1))
    size = rng.randint(*family.receptacles)
    while drawn.total() < size:
        most = {r: family.per_receptacle_type if r in REPEATED else 1 for r in family.receptacle_types}
        free = [r for r in family.receptacle_types if drawn[r] < most[r]]
        if not free:
            break
        # Real rooms have many of a few kinds; what is there already is drawn more often.
        weights = [1 + 2 * drawn[r] if r in ("Cabinet", "Drawer", "Shelf") else 1 for r in free]
        drawn[rng.choices(free, weights)[0]] += 1
    for kind in sorted(drawn):
        for number in range(drawn[kind]):
            id = plan.add_receptacle(kind)
            shares = number and kind in ("Cabinet", "Drawer") and rng.random() < family.shared_places
            plan.places[id] = len(plan.receptacles) - 1 if not shares else plan.places[plan.receptacles[-2]]


def _furnish(plan: _Plan, task_type: str, target: str, destination: str) -> str | None:
    rng, family = plan.rng, plan.family
    wanted = 2 if task_type == "pick_two_obj_and_place" else 1
    for _ in range(wanted):
        plan.add_object(target, rng.choice(plan.hosts(target, banned=destination)))
    lamp = None
    if destination == LAMP:
        lamp = plan.add_object(LAMP, rng.choice(plan.hosts(LAMP)))
    size = rng.randint(*family.objects)
    for _ in range(8 * size):
        if len(plan.objects) - (lamp is not None) >= size:
            break
        kind = rng.choice(family.object_types)
        if plan.counts[kind] >= family.per_object_type:
            continue
        # The target never starts where it is wanted: the task would be done, or half done, before it begins.
        hosts = plan.hosts(kind, banned=destination if kind == target else "")
        if hosts:
            plan.add_object(kind, rng.choice(hosts))
    return lamp


def _problem(plan: _Plan, task_type: str, target: str, destination: str) -> str:
    receptacle_kinds = {_kind(r) for r in plan.receptacles}
    object_kinds = {_kind(o) for o in plan.objects}
    # The rules name these types, so they must exist even where no such thing does.
    rtypes = receptacle_kinds | {"SinkBasin", "Microwave", "Fridge"}
    otypes = object_kinds | {"Knife", "ButterKnife"}
    places = sorted(set(plan.places.values()))
    objects = ["agent1 - agent", "loc_bar_start - location"]
    objects += [f"loc_bar_{place} - location" for place in places]
    objects += [f"{id} - receptacle" for id in plan.receptacles] + [f"{id} - object" for id in plan.objects]
    objects += [f"{kind}Type - rtype" for kind in sorted(rtypes)]
    objects += [f"{kind}Type - otype" for kind in sorted(otypes)]
    facts = ["(atLocation agent1 loc_bar_start)", "(= (total-cost) 0)"]
    for id in plan.receptacles:
        facts.append(f"(receptacleType {id} {_kind(id)}Type)")
        facts.append(f"(receptacleAtLocation {id} loc_bar_{plan.places[id]})")
        if plan.family.openable and _kind(id) in OPENABLE:
            facts.append(f"(openable {id})")
    for kind in sorted(receptacle_kinds):
        held = sorted(o for o in object_kinds if o != LAMP and _may_hold(kind, o))
        facts += [f"(canContain {kind}Type {o}Type)" for o in held]
    for id, receptacle in plan.objects.items():
        kind = _kind(id)
        facts.append(f"(objectType {id} {kind}Type)")
        facts.append(f"(inReceptacle {id} {receptacle})")
        facts.append(f"(objectAtLocation {id} loc_bar_{plan.places[receptacle]})")
        facts.append(f"(toggleable {id})" if kind == LAMP else f"(pickupable {id})")
        properties = (("cleanable", CLEANABLE), ("heatable", HEATABLE), ("coolable", COOLABLE))
        facts += [f"({predicate} {id})" for predicate, kinds in properties if kind in kinds]
        if kind in DISHES:
            facts.append(f"(isReceptacleObject {id})")
    newline = "\n"
    return (
        f"(define (problem house)\n(:domain alfred)\n(:objects\n{newline.join(objects)}\n)\n"
        f"(:init\n{newline.join(facts)}\n)\n(:goal {_goal(task_type, target, destination)})\n)\n"
    )


def _goal(task_type: str, target: str, destination: str) -> str:
    if task_type == "look_at_obj_in_light":
        return (
            "(and (exists (?l - object ?r - receptacle ?a - agent ?p - location) (and (objectType ?l DeskLampType) "
            "(toggleable ?l) (isToggled ?l) (receptacleAtLocation ?r ?p) (atLocation ?a ?p) (inReceptacle ?l ?r))) "
            f"(exists (?o - object ?a - agent) (and (objectType ?o {target}Type) (holds ?a ?o))))"
        )
    lies = f"(objectType ?o {target}Type) (receptacleType ?r {destination}Type) (inReceptacle ?o ?r)"
    if task_type == "pick_two_obj_and_place":
        second = f"(not (= ?o ?o2)) (objectType ?o2 {target}Type) (inReceptacle ?o2 ?r)"
        lies += f" (exists (?o2 - object) (and {second}))"
    treated = {"clean": " (isClean ?o)", "heat": " (isHot ?o)", "cool": " (isCool ?o)"}
    lies += treated.get(TOOLS.get(task_type, ("", ""))[0], "")
    return f"(and (exists (?r - receptacle) (exists (?o - object) (and {lies}))))"


def _gold_path(plan: _Plan, task_type: str, target: str, destination: str, lamp: str | None) -> list[str]:
    ids = [*plan.receptacles, *plan.objects]
    lowered = entity_names([id.lower() for id in ids])
    names = {id: lowered[id.lower()] for id in ids}
    path: list[str] = []
    opened: set[str] = set()
    here: int | None = None

    def visit(receptacle: str, inside: bool) -> None:
        nonlocal here
        if plan.places[receptacle] != here:
            path.append(f"go to {names[receptacle]}")
            here = plan.places[receptacle]
        if inside and plan.family.openable and _kind(receptacle) in OPENABLE and receptacle not in opened:
            path.append(f"open {names[receptacle]}")
            opened.add(receptacle)

    targets = [id for id in plan.objects if _kind(id) == target]
    goals = [r for r in plan.receptacles if _kind(r) == destination]
    for id in targets[: 2 if task_type == "pick_two_obj_and_place" else 1]:
        visit(plan.objects[id], inside=True)
        path.append(f"take {names[id]} from {names[plan.objects[id]]}")
        if lamp is not None:
            visit(plan.objects[lamp], inside=False)
            path.append(f"use {names[lamp]}")
            break
        if task_type in TOOLS:
            verb, kind = TOOLS[task_type]
            tool = next(r for r in plan.receptacles if _kind(r) == kind)
            visit(tool, inside=False)
            path.append(f"{verb} {names[id]} with {names[tool]}")
        visit(goals[0], inside=True)
        path.append(f"move {names[id]} to {names[goals[0]]}")
    return path
