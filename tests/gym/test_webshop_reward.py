"""WebShop's reward, its fuzzy comparison and the noun taggers."""

import json
import pickle
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from divopd_gym.envs.webshop.fuzzy import alike, similarity
from divopd_gym.envs.webshop.goals import Goal, goal_order
from divopd_gym.envs.webshop.nouns import CatalogueNouns, FileNouns, SpacyNouns, get_tagger
from divopd_gym.envs.webshop.products import Product
from divopd_gym.envs.webshop.reward import COLOURS, judge, reduce_colour
from divopd_gym.errors import ConfigError, DataNotFoundError

LAMP = Product(
    asin="A1",
    title="Brass lamp",
    bullets=["easy install"],
    query="lamps",
    category="garden",
    product_category="a › b › c",
    attributes=["energy efficient"],
    nouns=["lamp", "brass"],
)


def goal(**changes):
    usual = {
        "index": 0,
        "asin": "A1",
        "text": "",
        "attributes": ("energy efficient",),
        "options": {},
        "price_upper": 50.0,
        "title": "Brass lamp",
        "category": "garden",
        "query": "lamps",
        "product_category": "a › b › c",
        "weight": 1.0,
    }
    return Goal(**(usual | changes))


def reward(bought=LAMP, wanted=None, price=20.0, options=None, target=LAMP):
    return judge(bought, wanted or goal(), price, options or {}, CatalogueNouns(), target)


def test_everything_met_gives_one():
    value, parts = reward()
    assert value == 1.0 and parts["r_type"] == 1.0 and "r_option" not in parts


def test_each_unmet_part_costs_its_share():
    wanted = goal(attributes=("energy efficient", "dimmable"), options={"color": "blue"})
    assert reward(wanted=wanted, options={"color": "navy blue"})[0] == pytest.approx(3 / 4)
    assert reward(wanted=wanted, price=99.0)[0] == pytest.approx(1 / 4)


def test_attributes_count_where_the_texts_name_them():
    assert reward(wanted=goal(attributes=("easy install",)))[0] == 1.0
    # The wanted phrase is looked for as it is written.
    assert reward(wanted=goal(attributes=("Easy Install!",)), bought=LAMP)[1]["r_att"] == 0.0


def test_options_of_people_and_of_generated_goals_are_compared_differently():
    people = goal(options=("large",))
    made = goal(options={"size": "large"})
    assert reward(wanted=people, options={"size": "large"})[1]["r_option"] == 1.0
    assert reward(wanted=made, options={"size": "large"})[1]["r_option"] == 1.0
    # Of a generated option the group's name counts as words, and colours are not reduced.
    chosen = {"c": "lightblue"}
    assert reward(wanted=goal(options=("darkblue",)), options=chosen)[1]["r_option"] == 1.0
    assert reward(wanted=goal(options={"c": "darkblue"}), options=chosen)[1]["r_option"] == 0.0


@pytest.mark.parametrize(
    ("bought", "factor"),
    [
        ({"nouns": ["lamp", "brass"]}, 1.0),
        ({"nouns": ["lamp"], "query": "x", "product_category": "x"}, 1.0),
        ({"nouns": ["chair"], "query": "lamps"}, 0.0),
        ({"nouns": ["lamp"], "query": "x", "product_category": "a › x"}, 1.0),
    ],
)
def test_the_kind_of_product_scales_the_reward(bought, factor):
    other = Product(**{**LAMP.__dict__, "asin": "A2", **bought})
    assert reward(bought=other)[1]["r_type"] == factor


def test_titles_that_share_little_are_half_or_a_tenth():
    target = Product(**{**LAMP.__dict__, "nouns": [f"n{i}" for i in range(20)]})
    for shared, factor in ((3, 0.5), (1, 0.1), (0, 0.0)):
        other = Product(
            **{
                **LAMP.__dict__,
                "query": "x",
                "product_category": "x",
                "nouns": [f"n{i}" for i in range(shared)],
            }
        )
        assert reward(bought=other, target=target)[1]["r_type"] == factor


def test_a_target_without_nouns_counts_as_a_fifth():
    target = Product(**{**LAMP.__dict__, "nouns": []})
    assert reward(target=target)[1]["title_score"] == 0.2


def test_colours_are_reduced_to_the_first_name_contained():
    assert len(COLOURS) == 102 and list(COLOURS) == sorted(COLOURS)
    assert reduce_colour("dark blue") == "blue"
    assert reduce_colour("standard") == "tan"
    assert reduce_colour("xl") == "xl"
    assert reduce_colour(("color", "blue")) == "blue" and reduce_colour(("color", "sky")) == ("color", "sky")


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ("", "x", 0),
        ("...", "x", 0),
        ("a b", "b a", 100),
        ("red", "red shoe", 100),
        ("Crème", "crme", 100),
        ("abc", "xyz", 0),
        ("('size', 'large')", "large", 100),
    ],
)
def test_similarity_is_of_sets_of_words(one, two, expected):
    assert similarity(one, two) == expected


@settings(max_examples=400, deadline=None)
@given(st.text("ab cd-é1(,中", max_size=25), st.text("ab cd-é1(,中", max_size=25))
def test_similarity_agrees_with_the_library(one, two):
    rapidfuzz = pytest.importorskip("rapidfuzz")
    latin = {code: None for code in range(128, 256)}
    first, second = (rapidfuzz.utils.default_process(text.translate(latin)) for text in (one, two))
    known = round(rapidfuzz.fuzz.token_set_ratio(first, second))
    assert similarity(one, two) == known
    assert alike(one, two) == (known > 85)


def test_the_order_of_goals_is_a_fixed_shuffle():
    order = goal_order(6910)
    assert sorted(order) == list(range(6910)) and goal_order(6910) == order != goal_order(6910, seed=1)


def test_there_is_no_silent_fall_back_between_taggers(tmp_path, monkeypatch):
    plain = Product(asin="X", title="lamp")
    with pytest.raises(ConfigError, match="spacy:en_core_web_sm"):
        get_tagger("catalogue").nouns(plain)
    with pytest.raises(ConfigError, match="choose 'catalogue'"):
        get_tagger("nltk")
    with pytest.raises(DataNotFoundError, match="noun file"):
        get_tagger(f"file:{tmp_path}/none.json")
    path = tmp_path / "nouns.json"
    path.write_text(json.dumps({"one": {"A": ["lamp"]}, "two": {}}))
    assert FileNouns(path, "one").nouns(Product(asin="A", title="")) == ["lamp"]
    with pytest.raises(ConfigError, match="has no product X"):
        FileNouns(path, "two").nouns(plain)
    with pytest.raises(ConfigError, match="has the models one, two"):
        FileNouns(path)
    monkeypatch.setitem(sys.modules, "spacy", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"divopd\[webshop\]"):
        SpacyNouns()


def test_a_missing_model_is_named_with_the_remedy():
    pytest.importorskip("spacy")
    with pytest.raises(ConfigError, match="spacy download en_core_web_none") as caught:
        SpacyNouns("en_core_web_none")
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args


@pytest.mark.env
def test_spacy_finds_the_nouns_of_the_recorded_model(shared_data):
    pytest.importorskip("spacy")
    try:
        tagger = SpacyNouns("en_core_web_sm")
    except ConfigError as error:
        pytest.skip(str(error))
    if not tagger.name.endswith("3.8.0"):
        pytest.skip(f"the recorded nouns are of model 3.8.0, not {tagger.name}")
    folder = shared_data("webshop")
    known = json.loads((folder / "spacy_title_nouns.json").read_text(encoding="utf-8"))["sm-3.8.0"]
    records = json.loads((folder / "items_shuffle_1000.json").read_text(encoding="utf-8"))[:300]
    for record in records:
        assert tagger.nouns(Product(asin=record["asin"], title=record["name"])) == known[record["asin"]]
