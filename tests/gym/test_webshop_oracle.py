"""WebShop against recordings of the original: goals, tokens, search, pages, rewards. Skipped where they are absent."""

import gzip
import json
import lzma

import pytest

from divopd_gym.envs.webshop.analysis import analyse
from divopd_gym.envs.webshop.goals import goal_order
from divopd_gym.envs.webshop.nouns import FileNouns
from divopd_gym.envs.webshop.prepare import get_store
from divopd_gym.envs.webshop.search import SearchEngine
from divopd_gym.envs.webshop.shop import Shop
from divopd_gym.envs.webshop.site import Visit

pytestmark = pytest.mark.env
MODELS = ("sm-3.6.0", "sm-3.8.0", "md-3.8.0")


@pytest.fixture(scope="module")
def files(shared_data):
    folder = shared_data("webshop")

    def read(name):
        path = folder / name
        if name.endswith(".jsonl.xz"):
            with lzma.open(path, "rt", encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
        with opener(path, "rt", encoding="utf-8") as file:
            return json.load(file)

    read.folder = folder
    return read


@pytest.fixture(scope="module")
def store(files, tmp_path_factory):
    return get_store(files.folder, index_dir=tmp_path_factory.mktemp("webshop") / "index")


def a_shop(files, store, kind="synthetic", model="sm-3.6.0"):
    return Shop(store, FileNouns(files.folder / "spacy_title_nouns.json", model), kind)


def test_every_record_is_loaded_in_order(files, store):
    asins = [record["asin"] for record in files("items_shuffle_1000.json")]
    assert [store.catalogue.product(row).asin for row in range(len(store.catalogue))] == asins


@pytest.mark.parametrize("kind", ["synthetic", "human"])
def test_goals_prices_and_weights_are_those_of_the_original(files, store, kind):
    expected = files(f"oracle_goals_{kind}.json.xz")
    goals = store.goals(kind)
    assert len(goals) == len(expected["goals"])
    for goal, known in zip(goals, expected["goals"], strict=True):
        options = goal.options if isinstance(goal.options, dict) else list(goal.options)
        assert known == {
            "asin": goal.asin,
            "category": goal.category,
            "query": goal.query,
            "name": goal.title,
            "product_category": goal.product_category,
            "instruction_text": goal.text,
            "attributes": list(goal.attributes),
            "price_upper": goal.price_upper,
            "goal_options": options,
            "weight": goal.weight,
        }
    prices = {store.catalogue.product(row).asin: float(price) for row, price in enumerate(goals.prices)}
    assert prices == expected["prices"]


def test_the_order_of_the_full_human_goals_holds_without_their_catalogue(files, store):
    texts = files("human_goals_12087.json")
    by_place = dict(zip(goal_order(len(texts)), texts, strict=True))
    # That file was written without straight quotes.
    first = [
        request["instruction"].strip(".").translate({ord("'"): None, ord('"'): None})
        for _, request in store.catalogue.human()
    ]
    assert len(by_place) == 12_087 and len(first) == 13
    assert [by_place[place] for place in range(13)] == first


def test_every_token_of_every_document_is_lucenes(files, store):
    expected = files("lucene_doc_tokens.json.gz")
    for row in range(len(store.catalogue)):
        product = store.catalogue.product(row)
        assert analyse(product.search_text) == expected[product.asin], product.asin


def test_every_query_gives_lucenes_first_fifty_in_order(files, store):
    for case in files("lucene_search_oracle.jsonl.xz"):
        assert analyse(case["query"]) == case["tokens"]
        found = store.engine.search(case["query"], 50)
        assert [store.catalogue.product(row).asin for row, _ in found] == case["top50"], case["query"]
        assert all(abs(score - known) < 1e-3 for (_, score), known in zip(found, case["scores"], strict=True))


def test_the_compiled_search_gives_lucenes_first_fifty_too(files, store, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr("divopd_gym.envs.webshop.search._FEW", 0)
    engine = SearchEngine(store.postings, store.catalogue.term_number)
    for case in files("lucene_search_oracle.jsonl.xz"):
        found = engine.search(case["query"], 50)
        assert [store.catalogue.product(row).asin for row, _ in found] == case["top50"], case["query"]


def test_every_page_of_every_recorded_episode_is_equal(files, store):
    shops = {kind: a_shop(files, store, kind) for kind in ("synthetic", "human")}
    visit, episodes = None, 0
    for record in files("oracle_traces.jsonl.xz"):
        if record.get("episode_start"):
            episodes += 1
            shop, index = shops[record["kind"]], record["goal_index"]
            visit = Visit(shop, shop.goals[index], str(index), compat="upstream")
            continue
        if record["action"] is not None:
            answer = visit.act(record["action"])
            assert (answer.reward, answer.done) == (record["reward"], record["done"])
        assert visit.url == record["url"]
        assert visit.text() == record["text"]
        assert visit.rich() == record["text_rich"]
        assert visit.available() == record["available_actions"]
        if "verbose_info" in record:
            assert visit.details == record["verbose_info"]
    assert episodes == 126


@pytest.mark.parametrize("model", MODELS)
def test_the_kind_of_product_is_judged_as_under_each_noun_model(files, store, model):
    shop, judged, kind, index = None, 0, None, None
    shops = {kind: a_shop(files, store, kind, model) for kind in ("synthetic", "human")}
    for record in files("oracle_traces.jsonl.xz"):
        if record.get("episode_start"):
            kind, index = record["kind"], record["goal_index"]
        elif "final" in record:
            shop = shops[kind]
            final = record["final"]
            reward, parts = shop.judge(final["asin"], shop.goals[index], final["options"])
            assert parts["r_type"] == record["r_type_by_spacy_model"][model]
            assert reward == pytest.approx(record["reward_by_spacy_model"][model], abs=1e-12)
            judged += 1
    assert judged == 90


def test_every_recorded_reward_is_equal_with_its_parts(files, store):
    shops = {kind: a_shop(files, store, kind) for kind in ("synthetic", "human")}
    cases = files("reward_oracle.jsonl.xz")
    assert len(cases) == 2008
    for case in cases:
        shop = shops[case["kind"]]
        goal = shop.goals[case["goal_index"]]
        assert shop.price(case["asin"]) == case["price"]
        assert shop.judge(case["asin"], goal, case["options"]) == (case["reward"], case["info"])


def test_asking_for_a_goal_past_the_end_names_the_counts(files, store):
    from divopd_gym.errors import ConfigError

    with pytest.raises(ConfigError, match=r"13 human goals .* index 23 asked for; the full set has 12,087"):
        store.goals("human")[23]
