"""Generated houses as text, and the expert on scripted texts; the engine is not started here."""

import re

import pytest

pytest.importorskip("alfworld", reason="the generated houses use the logic files of the package alfworld")

from divopd_gym import ConfigError  # noqa: E402
from divopd_gym.envs.alfworld.expert import SearchExpert  # noqa: E402
from divopd_gym.envs.alfworld.grammar import GOAL_MARK, entity_names, split_goal  # noqa: E402
from divopd_gym.envs.alfworld.houses import (  # noqa: E402
    FAMILIES,
    HELD_OUT_SEED,
    RECEPTACLE_TYPES,
    HouseFamily,
    house_from_id,
    make_house,
    task_ids,
)
from divopd_gym.envs.alfworld.world import HOLDS, OPENABLE, TASK_TYPES, TOOLS, TREATABLE  # noqa: E402


def start(house):
    return house.source.problem.split("(:goal")[0]


def contents(house):
    return dict(re.findall(r"\(inReceptacle (\S+) (\S+)\)", start(house)))


def kind(id):
    parts = id.split("_bar_")
    return parts[2] if len(parts) == 3 else parts[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_house_is_a_function_of_its_id(family):
    for id in task_ids(family, 12):
        house = house_from_id(id)
        make_house.cache_clear()
        assert house_from_id(id) == house and house.task_id == id


def test_the_houses_of_published_ids_do_not_change():
    house = house_from_id("small/pick_cool_then_place_in_recep/4")
    assert house.goal == "cool some bread and put it in sidetable"
    assert house.gold_path == [
        "go to fridge 1",
        "open fridge 1",
        "take bread 1 from fridge 1",
        "cool bread 1 with fridge 1",
        "go to sidetable 2",
        "move bread 1 to sidetable 2",
    ]


def test_training_and_validation_ids_never_meet():
    train = {id.split("/")[2] for id in task_ids("tiny", 500)}
    valid = {id.split("/")[2] for id in task_ids("tiny", 500, "valid")}
    assert not train & valid and min(map(int, valid)) == HELD_OUT_SEED
    with pytest.raises(ConfigError, match="seeds below"):
        task_ids("tiny", 10, first_seed=HELD_OUT_SEED - 5)


def test_task_types_take_turns():
    ids = task_ids("tiny", 60)
    assert [sum(f"/{t}/" in id for id in ids) for t in TASK_TYPES] == [10] * 6


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda f: f.name)
def test_houses_keep_to_their_family(family):
    for id in task_ids(family, 60):
        house = house_from_id(id)
        receptacles = re.findall(r"\(receptacleType (\S+) (\S+)Type\)", start(house))
        objects = contents(house)
        assert len(receptacles) <= family.receptacles[1]
        assert {t for _, t in receptacles} <= set(family.receptacle_types)
        counts = {t: [kind(o) for o in objects].count(t) for t in {kind(o) for o in objects}}
        asked = 2 if house.task_type == "pick_two_obj_and_place" else 1
        assert all(
            n <= max(family.per_object_type, asked if t == house.target else 1) for t, n in counts.items()
        )
        if family.per_receptacle_type == 1:
            assert len({t for _, t in receptacles}) == len(receptacles)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_done_before_the_task_begins(family):
    for id in task_ids(family, 60):
        house = house_from_id(id)
        targets = [r for o, r in contents(house).items() if kind(o) == house.target]
        assert len(targets) >= (2 if house.task_type == "pick_two_obj_and_place" else 1)
        assert house.destination not in {kind(r) for r in targets}
        if house.task_type in TOOLS:
            verb, tool = TOOLS[house.task_type]
            assert house.target in TREATABLE[verb] and f"{tool}Type)" in house.source.problem


def test_things_lie_only_where_they_may():
    for id in task_ids("large", 30):
        for thing, receptacle in contents(house_from_id(id)).items():
            assert kind(thing) in HOLDS[kind(receptacle)] or kind(thing) == "DeskLamp"


def test_a_family_without_doors_has_nothing_to_open():
    family = HouseFamily("open", openable=False)
    assert "(openable" not in make_house(family, TASK_TYPES[0], 3).source.problem
    assert not any(
        a.startswith("open") for s in range(20) for a in make_house(family, TASK_TYPES[0], s).gold_path
    )
    closed = [make_house(FAMILIES["tiny"], TASK_TYPES[0], s) for s in range(20)]
    assert all(
        ("(openable" in h.source.problem) == bool({kind(r) for r in placed(h)} & OPENABLE) for h in closed
    )


def placed(house):
    return re.findall(r"\(receptacleAtLocation (\S+) ", house.source.problem)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"object_types": ("Banana",)}, "Banana"),
        ({"receptacle_types": ()}, "empty"),
        ({"receptacles": (5, 4)}, "range"),
        ({"wordings": 3}, "wordings"),
        ({"search": "clever"}, "search"),
        ({"task_types": ("pick_up",)}, "pick_and_place_simple"),
    ],
)
def test_a_family_that_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        HouseFamily("odd", **arguments)


def test_a_task_that_a_family_cannot_hold_is_refused():
    family = HouseFamily("dry", receptacle_types=("Desk", "Drawer"), object_types=("Pen",))
    with pytest.raises(ConfigError, match="SinkBasin|sink"):
        make_house(family, "pick_clean_then_place_in_recep", 0)
    with pytest.raises(ConfigError, match="choose from"):
        task_ids("tiny", 5, task_types=("fly",))
    with pytest.raises(ConfigError, match="huge"):
        task_ids("huge", 5)
    with pytest.raises(ConfigError, match="expected <family>"):
        house_from_id("tiny/pick")


def test_things_of_a_type_are_numbered_from_the_last_id_on():
    ids = ["apple_bar__minus_01", "apple_bar__plus_01", "sink_bar_1_bar_sinkbasin", "sink_bar_1", "curtains"]
    assert entity_names(ids) == {
        "apple_bar__minus_01": "apple 2",
        "apple_bar__plus_01": "apple 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "sink_bar_1": "sink 1",
        "curtains": "curtains ",
    }


def test_only_a_plain_goal_sentence_is_taken_out_of_the_grammar():
    assert split_goal('"rhs": "Your task is to: put a pen in desk."') == (
        f'"rhs": "Your task is to: {GOAL_MARK}."',
        "put a pen in desk",
    )
    odd = '"rhs": "Your task is to: {r.name}."'
    assert split_goal(odd) == (odd, None)


ROOM = (
    "You are in the middle of a room. Looking quickly around you, you see a desk 2, a desk 1, a drawer 2, a drawer 1, "
    "a fridge 1, a shelf 1, and a sinkbasin 1.\n\nYour task is to: {}."
)


def expert(goal, *turns, order="listed"):
    player = SearchExpert(order)
    player.reset(ROOM.format(goal), {})
    for action, observation in turns:
        player.observe(action, observation, {})
    return player


AT_DESK = ("go to desk 2", "You arrive at desk 2. On the desk 2, you see a pen 1, and a mug 2.")


@pytest.mark.parametrize(
    ("goal", "understood"),
    [
        ("put some apple on sidetable", ("put", "apple", "sidetable")),
        ("put a pen in desk", ("put", "pen", "desk")),
        ("put a clean mug in shelf", ("clean", "mug", "shelf")),
        ("heat some egg and put it in fridge", ("heat", "egg", "fridge")),
        ("cool some pan and put it in stoveburner", ("cool", "pan", "stoveburner")),
        ("find two pillow and put them in sofa", ("two", "pillow", "sofa")),
        ("put two cd in safe", ("two", "cd", "safe")),
        ("look at bowl under the desklamp", ("look", "bowl", "desklamp")),
        ("examine the book with the desklamp", ("look", "book", "desklamp")),
    ],
)
def test_every_wording_of_a_goal_is_understood(goal, understood):
    assert expert(goal).goal == understood


def test_an_unknown_goal_is_answered_with_a_look_and_no_error():
    assert expert("water the plants").act() == "look"
    player = SearchExpert()
    player.reset("", {"goal": "put a pen in desk."})
    assert player.act() == "look"


def test_asking_twice_gives_the_same_action():
    player = expert("put a cd in shelf", AT_DESK)
    assert player.act() == player.act() == "go to desk 1"


def test_the_search_follows_the_order_of_the_room_text_and_opens_what_is_closed():
    player = expert("put a cd in shelf")
    seen = []
    for _ in range(6):
        action = player.act()
        seen.append(action)
        place = action.split(" ", 1 if action.startswith("open") else 2)[-1]
        if action.startswith("open"):
            reply = f"You open the {place}. The {place} is open. In it, you see nothing."
        elif "drawer" in place:
            reply = f"You arrive at {place}. The {place} is closed."
        else:
            reply = f"You arrive at {place}. On the {place}, you see nothing."
        player.observe(action, reply, {})
    assert seen == [
        "go to desk 2",
        "go to desk 1",
        "go to drawer 2",
        "open drawer 2",
        "go to drawer 1",
        "open drawer 1",
    ]


def test_likely_places_come_first_when_asked_for():
    assert expert("put a tomato in desk", order="likely").act() == "go to sinkbasin 1"


def test_a_known_object_is_fetched_from_where_it_was_seen():
    elsewhere = ("go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing.")
    assert expert("put a mug in shelf", AT_DESK).act() == "take mug 2 from desk 2"
    assert expert("put a mug in shelf", AT_DESK, elsewhere).act() == "go to desk 2"


def test_a_wrong_object_in_the_hand_is_put_away_first():
    taken = ("take pen 1 from desk 2", "You pick up the pen 1 from the desk 2.")
    assert expert("put a mug in shelf", AT_DESK, taken).act() == "move pen 1 to desk 2"


def test_a_treated_object_put_down_elsewhere_is_taken_again_not_treated_again():
    turns = [
        AT_DESK,
        ("take mug 2 from desk 2", "You pick up the mug 2 from the desk 2."),
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("cool mug 2 with fridge 1", "You cool the mug 2 using the fridge 1."),
        ("go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing."),
        ("move mug 2 to desk 1", "You move the mug 2 to the desk 1."),
    ]
    assert expert("cool some mug and put it in shelf", *turns).act() == "take mug 2 from desk 1"
    turns.append(("take mug 2 from desk 1", "You pick up the mug 2 from the desk 1."))
    assert expert("cool some mug and put it in shelf", *turns).act() == "go to shelf 1"


def test_a_place_one_cannot_go_to_is_where_one_stands():
    turns = [
        ("go to drawer 2", "You arrive at drawer 2. The drawer 2 is closed."),
        ("open drawer 2", "You open the drawer 2. The drawer 2 is open. In it, you see nothing."),
        ("go to drawer 1", "Nothing happens."),
    ]
    assert expert("put a mug in shelf", *turns).act() == "examine drawer 1"


def test_both_objects_go_to_the_same_receptacle():
    turns = [
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a pen 1, and a pen 2."),
        ("take pen 1 from shelf 1", "You pick up the pen 1 from the shelf 1."),
        ("go to desk 1", "You arrive at desk 1. On the desk 1, you see nothing."),
        ("move pen 1 to desk 1", "You move the pen 1 to the desk 1."),
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a pen 2."),
        ("take pen 2 from shelf 1", "You pick up the pen 2 from the shelf 1."),
    ]
    assert expert("put two pen in desk", *turns).act() == "go to desk 1"
    assert expert("put two pen in desk", *turns[:4]).act() == "go to shelf 1"


def test_a_door_that_was_closed_again_is_opened_again():
    turns = [
        ("go to fridge 1", "You arrive at fridge 1. The fridge 1 is closed."),
        ("open fridge 1", "You open the fridge 1. The fridge 1 is open. In it, you see a egg 1."),
        ("close fridge 1", "You close the fridge 1."),
    ]
    assert expert("put a egg in desk", *turns).act() == "open fridge 1"


def test_the_older_games_words_are_used_when_asked_for():
    player = SearchExpert(wording="put")
    player.reset(ROOM.format("put a pen in desk"), {})
    turns = [
        ("go to desk 1", "You arrive at loc 5. On the desk 1, you see nothing."),
        ("go to shelf 1", "You arrive at loc 3. On the shelf 1, you see a pen 1, and a cd 1."),
        ("take pen 1 from shelf 1", "You pick up the pen 1 from the shelf 1."),
        ("go to desk 2", "You arrive at loc 4. On the desk 2, you see nothing."),
    ]
    for turn in turns:
        player.observe(*turn, {})
    assert player.act() == "put pen 1 in/on desk 2"
    player.observe("put pen 1 in/on desk 2", "You put the pen 1 in/on the desk 2.", {})
    assert player.holding is None


def test_a_family_takes_lists_and_refuses_a_name_that_no_id_can_hold():
    family = HouseFamily("lists", receptacle_types=list(RECEPTACLE_TYPES), receptacles=[6, 8])
    assert family.receptacle_types == RECEPTACLE_TYPES
    assert hash(family)
    with pytest.raises(ConfigError, match="letters, digits"):
        HouseFamily("mine/x")
