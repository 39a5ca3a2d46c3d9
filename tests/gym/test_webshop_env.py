"""WebShop as an environment: contract, actions, compat modes, determinism, vector use, pool, fuzz, leaks."""

import gc
import os
import random
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import divopd_gym  # noqa: F401
from divopd_gym.checks import check_text_env
from divopd_gym.envs.webshop.env import GoalIds
from divopd_gym.envs.webshop.generated import generate_products
from divopd_gym.envs.webshop.goals import Goal
from divopd_gym.envs.webshop.nouns import CatalogueNouns
from divopd_gym.envs.webshop.products import Product
from divopd_gym.envs.webshop.shop import Shop
from divopd_gym.envs.webshop.site import Visit
from divopd_gym.envs.webshop.store import build_store
from divopd_gym.errors import ConfigError, DataNotFoundError
from divopd_gym.pool import EnvPool

ID = "divopd_gym/WebShop-v0"
SMALL = {"num_products": 40}


def make(**kwargs):
    return gymnasium.make(ID, **(SMALL | kwargs))


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"goals": "human"},
        {"compat": "upstream", "observation_mode": "text_rich"},
        {"observation_mode": "html", "show_attributes": True},
        {"observation_mode": "url", "num_prev_obs": 2, "num_prev_actions": 3},
    ],
)
def test_it_keeps_the_contract_of_text_environments(kwargs):
    env = make(**kwargs)
    check_text_env(env)
    check_env(env.unwrapped, skip_render_check=True)


def play(env, seed, turns=12):
    rng = random.Random(seed)
    observation, info = env.reset(seed=seed)
    seen = [(observation, info)]
    for _ in range(turns):
        if info["done_reason"]:
            break
        *outcome, info = env.step(rng.choice(info["admissible_actions"]))
        seen.append((*outcome, info))
    return seen


def test_replays_are_equal_in_a_fresh_environment_and_interleaved():
    one, two = make(), make()
    alone = [play(one, seed) for seed in range(12)]
    interleaved = []
    for seed in range(12):
        interleaved.append(play(two, seed))
        play(one, 100 - seed)
    assert alone == interleaved
    assert one.unwrapped.shop.store is two.unwrapped.shop.store


def test_the_expert_buys_what_was_asked_for():
    for kwargs in ({}, {"goals": "human"}, {"compat": "upstream"}):
        env = make(**kwargs)
        for task in env.unwrapped.tasks[:40]:
            observation, info = env.reset(options={"task": task})
            assert env.unwrapped.gold_path() is not None
            expert = env.unwrapped.expert()
            expert.reset(observation, info)
            while not info["done_reason"]:
                action = expert.act()
                assert expert.act() == action
                observation, _, _, _, info = env.step(action)
                expert.observe(action, observation, info)
            assert info["success"], (task, info)


def test_the_expert_finds_back_from_anywhere():
    env = make()
    rng = random.Random(3)
    for task in env.unwrapped.tasks[:30]:
        observation, info = env.reset(options={"task": task})
        expert = env.unwrapped.expert()
        expert.reset(observation, info)
        for turn in range(25):
            wander = [a for a in info["admissible_actions"] if a != "click[buy now]"]
            action = rng.choice(wander) if turn < 8 else expert.act()
            observation, _, over, _, info = env.step(action)
            expert.observe(action, observation, info)
            if over:
                break
        assert info["score"] > 0.9, (task, info)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_vector_environments_give_the_same_episodes(mode):
    envs = gymnasium.make_vec(ID, num_envs=2, vectorization_mode=mode, num_products=40)
    single = make()
    try:
        observations, infos = envs.reset(seed=[3, 4])
        expected = [single.reset(seed=seed) for seed in (3, 4)]
        assert list(observations) == [observation for observation, _ in expected]
        actions = [info["admissible_actions"][0] for _, info in expected]
        observations, rewards, _, _, infos = envs.step(tuple(actions))
        for place, seed in enumerate((3, 4)):
            single.reset(seed=seed)
            observation, reward, _, _, info = single.step(actions[place])
            assert (observations[place], rewards[place]) == (observation, reward)
            assert infos["page"][place] == info["page"] == "results"
    finally:
        envs.close()


def test_the_pool_plays_it():
    import asyncio

    async def episode():
        pool = EnvPool(ID, dict(SMALL), workers=1, step_timeout_s=60, reset_timeout_s=120)
        await pool.start()
        try:
            handle = await pool.acquire()
            _, info = await handle.reset(task="1")
            while not info["done_reason"]:
                _, _, _, _, info = await handle.step(await handle.expert_act())
            pool.release(handle)
            return info
        finally:
            await pool.close()

    assert asyncio.run(episode())["success"]


def test_goals_are_named_by_index_and_unknown_ones_are_refused():
    env = make()
    for index in (2, np.int64(2), np.uint8(2)):
        _, info = env.reset(options={"goal_index": index})
        assert info["task"] == "2" and info["goal_index"] == 2
    count = len(env.unwrapped.tasks)
    for options in ({"task": str(count)}, {"goal_index": count}, {"goal_index": -1}):
        with pytest.raises(ConfigError, match=f"{count} synthetic goals in this catalogue"):
            env.reset(options=options)
    for task in ("-1", "01", "x", "", 3, "٣", "1" * 5000):
        with pytest.raises(ConfigError):
            env.reset(options={"task": task})
    with pytest.raises(ConfigError, match="whole number"):
        env.reset(options={"goal_index": "a"})
    with pytest.raises(ConfigError, match="unknown"):
        env.reset(options={"colour": 1})


def test_human_goals_past_the_end_name_the_size_of_the_full_set():
    with pytest.raises(ConfigError, match=r"human goals in this catalogue, index 23000 .* 12,087"):
        make(goals="human").reset(options={"goal_index": 23000})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"goals": "robots"},
        {"compat": "strict"},
        {"observation_mode": "image"},
        {"split": "dev"},
        {"tagger": "nltk"},
        {"num_products": -3},
        {"num_prev_obs": -1},
        {"split": "train", "num_products": 5},
    ],
)
def test_arguments_that_cannot_work_are_refused(kwargs):
    with pytest.raises(ConfigError):
        make(**kwargs)


def test_a_missing_folder_is_one_clear_error(tmp_path):
    with pytest.raises(DataNotFoundError, match="generated catalogue"):
        make(data_dir=tmp_path / "nowhere")


def test_splits_and_filters_keep_the_indices():
    everything = make(num_products=300).unwrapped.tasks
    test = make(num_products=300, split="test").unwrapped.tasks
    rest = make(num_products=300, split="eval").unwrapped.tasks
    assert list(test) == list(everything[:500]) and list(rest) == list(everything[500:1500])
    env = make(filter_goals=lambda index, goal: index % 2 == 1 and goal.price_upper > 0)
    assert all(int(task) % 2 for task in env.unwrapped.tasks)
    with pytest.raises(ConfigError):
        env.reset(options={"task": "0"})


def test_task_ids_know_their_members():
    for ids in (GoalIds(range(5, 9)), GoalIds(np.array([5, 6, 7, 8]))):
        assert list(ids) == ["5", "6", "7", "8"] and ids[-1] == "8" and ids[:2] == ["5", "6"]
        assert "5" in ids and "4" not in ids and "05" not in ids and 5 not in ids


def test_the_seed_decides_the_task_and_prices_follow_their_own_seed():
    env = make()
    assert env.reset(seed=3)[1]["task"] == env.reset(seed=3)[1]["task"]
    assert len({env.reset(seed=seed)[1]["task"] for seed in range(30)}) > 5
    usual, other = make(num_products=100).unwrapped, make(num_products=100, goal_seed=9).unwrapped
    assert [g.asin for g in usual.shop.goals] == [g.asin for g in other.shop.goals]
    assert [g.text for g in usual.shop.goals] != [g.text for g in other.shop.goals]


def test_a_longer_catalogue_begins_with_the_shorter_one_and_titles_have_nouns():
    short, long = list(generate_products(20)), list(generate_products(30))
    assert long[:20] == short and len({product.asin for product in long}) == 30
    for product in long:
        assert product.nouns and set(product.nouns) <= set(product.title.lower().replace(",", " ").split())


def test_generated_catalogues_have_the_benchmarks_shape():
    products = list(generate_products(600))
    share = lambda rule: sum(map(rule, products)) / len(products)  # noqa: E731
    assert 0.4 < share(lambda p: p.instruction is not None) < 0.6
    assert 0.2 < share(lambda p: not p.description) < 0.4
    assert 0.02 < share(lambda p: len(p.prices) == 2) < 0.2
    assert 0.35 < share(lambda p: not p.options) < 0.7
    assert share(lambda p: p.prices[0] >= 980) > 0
    assert any("" in p.bullets for p in products)
    text = " ".join(p.search_text for p in products)
    assert all(mark in text for mark in ('28" x 28"', "★", "❤️", "中国", " | "))
    titles = [p.title for p in products]
    assert len(set(titles)) < len(titles)


# A shop of two products with awkward texts, for the rules of pages.
def odd_shop():
    odd = Product(
        asin="A000000001",
        title="Odd lamp",
        description="",
        bullets=["", "bright"],
        options={"size": ['28" x 28"', "small", "features"], "colour": ["small", "grün"]},
        category="garden",
        query="lamps",
        product_category="a › b",
        attributes=["bright"],
        instruction="Find a lamp",
        instruction_attributes=["bright"],
        nouns=["lamp"],
    )
    plain = Product(asin="A000000002", title="Lamp", category="garden", query="lamps", nouns=["lamp"])
    return Shop(build_store([odd, plain]), CatalogueNouns())


def visit(compat, **kwargs):
    shop = odd_shop()
    return Visit(shop, shop.goals[0], "s", compat=compat, **kwargs)


def go(where, *actions):
    return [where.act(action).valid for action in actions]


def test_quoted_options_show_as_clicked_only_in_the_mended_form():
    shown = {}
    for compat in ("fixed", "upstream"):
        where = visit(compat)
        assert all(go(where, "search[odd lamp]", "click[a000000001]", 'click[28" x 28"]', "click[grün]"))
        shown[compat] = where.rich()
    assert '[clicked button] 28" x 28"' in shown["fixed"] and "[clicked button] grün" in shown["fixed"]
    assert "[clicked button]" not in shown["upstream"]


def test_a_value_of_two_groups_can_be_chosen_in_both_in_the_mended_form():
    fixed, upstream = visit("fixed"), visit("upstream")
    for where in (fixed, upstream):
        go(where, "search[odd lamp]", "click[a000000001]", "click[small]", "click[small]")
    assert fixed.options == {"size": "small", "colour": "small"}
    assert upstream.options == {"colour": "small"}


def test_searching_works_everywhere_only_upstream():
    assert go(visit("upstream"), "search[lamp]", "search[odd]") == [True, True]
    assert go(visit("fixed"), "search[lamp]", "search[odd]", "click[back to search]", "search[odd]") == [
        True,
        False,
        True,
        True,
    ]


def test_pages_end_only_in_the_mended_form():
    assert go(visit("upstream"), "search[lamp]", "click[next >]", "click[next >]") == [True] * 3
    fixed = visit("fixed")
    assert go(fixed, "search[lamp]", "click[next >]") == [True, False]


def test_the_reward_stands_on_the_last_page_only_upstream():
    for compat, stands in (("fixed", False), ("upstream", True)):
        where = visit(compat)
        go(where, "search[odd lamp]", "click[a000000001]")
        answer = where.act("click[buy now]")
        assert answer.done and 0 < answer.reward < 1
        assert (str(answer.reward) in where.text()) is stands


def test_words_of_a_query_are_taken_for_a_page_only_upstream():
    for compat, page in (("fixed", 1), ("upstream", 0)):
        where = visit(compat)
        go(where, "search[search_results lamp]", "click[a000000001]", "click[< prev]")
        assert where.number == page


def test_special_searches_work_and_the_crashing_ones_do_nothing():
    for compat in ("fixed", "upstream"):
        where = visit(compat)
        assert go(where, "search[<a> bright]") == [False] and where.page.name == "index"
        assert go(where, "search[<c> garden]") == [True] and len(where.page.found) == 2
        go(where, "click[back to search]")
        assert go(where, "search[<q> lamps]") == [True] and len(where.page.found) == 2
        go(where, "click[back to search]")
        assert go(where, "search[<r>]") == [True] and len(where.page.found) == 2
    assert go(visit("upstream"), "search[<c>]") == [False]


def test_options_are_forgotten_on_the_way_back_to_the_results_but_not_from_sub_pages():
    where = visit("fixed")
    go(where, "search[odd lamp]", "click[a000000001]", "click[small]", "click[description]", "click[< prev]")
    assert where.options == {"size": "small"} and where.page.name == "item"
    go(where, "click[< prev]", "click[a000000001]")
    assert where.options == {}


def test_empty_bullets_leave_an_empty_segment_and_empty_descriptions_none():
    where = visit("upstream", attributes=True)
    go(where, "search[odd lamp]", "click[a000000001]", "click[features]")
    assert where.text().endswith("< Prev [SEP]  [SEP] bright")
    go(where, "click[< prev]", "click[description]")
    assert where.text().endswith("< Prev")
    go(where, "click[< prev]", "click[attributes]")
    assert where.text().endswith("bright [SEP] garden [SEP] lamps [SEP] a › b")


def test_the_past_is_repeated_oldest_first():
    env = make(num_prev_obs=1, num_prev_actions=2)
    first, _ = env.reset(options={"task": "0"})
    second, *_ = env.step("nonsense")
    third, *_ = env.step("search[lamp]")
    now = env.unwrapped.visit.text()
    assert second == f"{first} [SEP] nonsense [SEP] {first}"
    assert third == f"nonsense [SEP] {first} [SEP] search[lamp] [SEP] {now}"


JUNK = [
    "",
    "[]",
    "search[]",
    "click[]",
    "click[search]",
    "search",
    "search[" + "a " * 5000 + "]",
    "x" * 10_000,
    "\x00\x01\x1b[31m",
    "search[\x00]",
    "search[\ud800]",
    "click[\ud800]",
    "search[<a> x]",
    "search[<c>]",
    "search[<c> ]",
    "search[<r>]",
    "search[<q>]",
    "search[<q> lamps]",
    "search[ ]",
    "search[搜索 поиск بحث 🔍]",
    "search[search_results item_page item_sub_page done]",
    "Search[lamp]",
    "click[Buy Now]",
    "click[< Prev]\n",
    "search[a]b]c",
    "search[[[[]",
    "search[%s {} \\]",
    "click[buy now] click[buy now]",
    "SEARCH[LAMP]",
    "search[İ ẞ ﬁ ΟΔΟΣ]",
]


@pytest.mark.parametrize("compat", ["fixed", "upstream"])
@pytest.mark.parametrize("mode", ["text", "text_rich", "html", "url"])
def test_no_action_raises(compat, mode):
    env = make(compat=compat, observation_mode=mode, max_turns=40, show_attributes=True)
    rng = random.Random(f"{compat}{mode}")
    letters = "search[]click <>[]{}\n\t'\"\\/|éß中🎁٣\x00"
    turns, over = 0, True
    while turns < 650:
        if over:
            _, info = env.reset(seed=turns)
        draw = rng.random()
        if draw < 0.35:
            action = rng.choice(JUNK)
        elif draw < 0.6:
            action = "".join(rng.choices(letters, k=rng.randint(0, 30)))
        elif draw < 0.7:
            action = (
                f"{rng.choice(['search', 'click'])}[{''.join(rng.choices(letters, k=rng.randint(1, 20)))}]"
            )
        else:
            action = rng.choice(info["admissible_actions"] or [""])
        observation, _, terminated, truncated, info = env.step(action)
        assert observation in env.observation_space
        turns, over = turns + 1, terminated or truncated


def _usage():
    status = Path("/proc/self/status").read_text()
    value = lambda key: int(status.split(key)[1].split()[0])  # noqa: E731
    return value("VmRSS:") / 1024, value("Threads:"), len(os.listdir("/proc/self/fd"))


@pytest.mark.env
def test_a_thousand_resets_leak_neither_memory_nor_threads_nor_descriptors():
    def cycle(count):
        for number in range(count):
            env = make()
            _, info = env.reset(seed=number)
            for action in ("search[red curtain]", "click[next >]", "click[back to search]"):
                env.step(action)
            env.close()
        gc.collect()

    cycle(200)
    memory, threads, descriptors = _usage()
    cycle(1000)
    after = _usage()
    assert after[1:] == (threads, descriptors)
    assert after[0] - memory < 8, f"{after[0] - memory:.1f} MB more after 1,000 cycles"


def test_versions_name_tagger_and_data():
    one, two = make().unwrapped.versions(), make(catalogue_seed=1).unwrapped.versions()
    assert one["tagger"] == "catalogue" and one["data"] != two["data"]
    assert isinstance(make().unwrapped.goal("0"), Goal)
