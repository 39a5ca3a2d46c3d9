"""What ALFWorld's things are: which receptacle holds what, what opens, what can be washed, heated and cooled."""

from __future__ import annotations

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
"""ALFWorld's six task types, in the benchmark's order."""

SHORT_NAMES = dict(zip(TASK_TYPES, ("pick", "look", "clean", "heat", "cool", "pick2")))
"""Task type -> the short name that tables use."""

TOOLS = {
    "pick_clean_then_place_in_recep": ("clean", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("heat", "Microwave"),
    "pick_cool_then_place_in_recep": ("cool", "Fridge"),
}
"""Task type -> the verb that treats the object, and the receptacle that does it."""

OPENABLE = frozenset({"Cabinet", "Drawer", "Fridge", "Microwave", "Safe"})
CLEANABLE = frozenset(
    [
        "Apple",
        "Bowl",
        "ButterKnife",
        "Cloth",
        "Cup",
        "DishSponge",
        "Egg",
        "Fork",
        "Kettle",
        "Knife",
        "Ladle",
        "Lettuce",
        "Mug",
        "Pan",
        "Plate",
        "Pot",
        "Potato",
        "SoapBar",
        "Spatula",
        "Spoon",
        "Tomato",
    ]
)
HEATABLE = frozenset(["Apple", "Bread", "Cup", "Egg", "Mug", "Plate", "Potato", "Tomato"])
COOLABLE = frozenset(
    [
        "Apple",
        "Bowl",
        "Bread",
        "Cup",
        "Egg",
        "Lettuce",
        "Mug",
        "Pan",
        "Plate",
        "Pot",
        "Potato",
        "Tomato",
        "WineBottle",
    ]
)
TREATABLE = {"clean": CLEANABLE, "heat": HEATABLE, "cool": COOLABLE}
DISHES = frozenset(["Bowl", "Cup", "Mug", "Pan", "Plate", "Pot"])
"""Objects that are receptacles themselves (the engine only words them differently)."""

REPEATED = frozenset(
    ["ArmChair", "Cabinet", "CounterTop", "DiningTable", "Drawer", "Shelf", "SideTable", "StoveBurner"]
)
"""Receptacle types of which a room often has several."""

LAMP = "DeskLamp"
LAMP_STANDS = ("Desk", "Dresser", "SideTable", "Shelf", "CoffeeTable", "DiningTable")
"""Receptacles that a lamp can stand on."""

_FOOD = "Apple Bread Egg Lettuce Potato Tomato"
_CUTLERY = "ButterKnife Fork Knife Ladle Spatula Spoon"
_SMALL = "CD CellPhone CreditCard KeyChain Pen Pencil RemoteControl Watch"
_PAPER = "Book Newspaper"
_DESKTOP = f"{_SMALL} {_PAPER} AlarmClock Laptop Statue TissueBox Vase Box"
_KITCHENWARE = (
    f"{_FOOD} {_CUTLERY} Bowl Cup Kettle Mug Pan Plate Pot PepperShaker SaltShaker WineBottle Glassbottle"
)
_BATH = "Cloth DishSponge HandTowel SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Candle"

_HOLDS = {
    "ArmChair": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
    "BathtubBasin": "Cloth DishSponge HandTowel SoapBar",
    "Bed": "Book CellPhone Laptop Pillow",
    "Cabinet": f"Book Bowl Cup Kettle Ladle Mug Pan Plate Pot PepperShaker SaltShaker Vase WineBottle {_BATH}",
    "Cart": _BATH,
    "CoffeeMachine": "Mug",
    "CoffeeTable": f"{_DESKTOP} Bowl Candle Plate",
    "CounterTop": f"{_KITCHENWARE} {_BATH} Book CellPhone CreditCard Pen Pencil Statue Vase",
    "Desk": f"{_DESKTOP} Bowl Mug",
    "DiningTable": f"{_KITCHENWARE} {_DESKTOP} Candle DishSponge SoapBottle",
    "Drawer": f"{_CUTLERY} {_SMALL} {_PAPER} Cloth DishSponge SoapBar SoapBottle PepperShaker SaltShaker TissueBox",
    "Dresser": f"{_DESKTOP} Bowl Mug Plate Candle Cloth",
    "Fridge": f"{_FOOD} Bowl Cup Glassbottle Mug Pan Plate Pot WineBottle",
    "GarbageCan": f"{_FOOD} CD Cloth DishSponge Newspaper Pen Pencil SoapBar TissueBox ToiletPaper",
    "HandTowelHolder": "HandTowel",
    "LaundryHamper": "Cloth",
    "Microwave": "Apple Bowl Bread Cup Egg Glassbottle Mug Plate Potato Tomato",
    "Ottoman": "Box CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
    "Safe": "CD CellPhone CreditCard KeyChain Watch",
    "Shelf": f"{_SMALL} {_PAPER} {_BATH} AlarmClock Bowl Box Cup Kettle Mug Plate Pot Statue Vase WineBottle",
    "SideTable": f"{_KITCHENWARE} {_DESKTOP} {_BATH}",
    "SinkBasin": f"Apple Bowl Cup Egg Fork Knife Lettuce Mug Pan Plate Pot Potato Spoon Tomato Cloth SoapBar {_CUTLERY}",
    "Sofa": "Book Box CellPhone CreditCard KeyChain Laptop Newspaper Pillow RemoteControl",
    "StoveBurner": "Kettle Pan Pot",
    "Toilet": _BATH,
    "ToiletPaperHanger": "ToiletPaper",
    "TVStand": "TissueBox RemoteControl",
}
HOLDS: dict[str, frozenset[str]] = {
    receptacle: frozenset(held.split()) for receptacle, held in _HOLDS.items()
}
"""Receptacle type -> object types that may lie there."""

OBJECT_TYPES = tuple(sorted(frozenset().union(*HOLDS.values())))
RECEPTACLE_TYPES = tuple(sorted(HOLDS))

GOALS = {
    "pick_and_place_simple": ("put a {obj} in {recep}", "put some {obj} on {recep}"),
    "look_at_obj_in_light": ("look at {obj} under the {lamp}", "examine the {obj} with the {lamp}"),
    "pick_clean_then_place_in_recep": (
        "put a clean {obj} in {recep}",
        "clean some {obj} and put it in {recep}",
    ),
    "pick_heat_then_place_in_recep": ("put a hot {obj} in {recep}", "heat some {obj} and put it in {recep}"),
    "pick_cool_then_place_in_recep": ("put a cool {obj} in {recep}", "cool some {obj} and put it in {recep}"),
    "pick_two_obj_and_place": ("put two {obj} in {recep}", "find two {obj} and put them in {recep}"),
}
"""Task type -> the benchmark's two wordings of its goal."""
