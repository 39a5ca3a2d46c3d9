"""Whatever a player says: no exception, no hang, and every answer keeps the contract.

The engines below are C and Java, which nothing can interrupt from inside their process. So the actions go through
workers of a pool, and a hang is a worker that did not answer before its deadline.
"""

import json
import math
import random
import re

import pytest

from divopd_gym.core import INFO_KEYS, DoneReason
from divopd_gym.envs.webshop.site import parse_action
from divopd_gym.errors import PoolError
from divopd_gym.pool_sync import SyncEnvPool
from divopd_gym.spaces import TextSpace

ANSWER_WITHIN_S = 120.0
FULL = [pytest.mark.slow, pytest.mark.timeout(3600)]

# Environment: what it needs, ways of making it, and what has made it or its original fail.
PLACES = {
    "ALFWorld": (
        "alfworld",
        [
            {"split": "generated", "family": "small", "max_turns": 50},
            {"split": "generated", "family": "large", "max_turns": None},
        ],
        ["put apple 1 in/on fridge 1", "move apple 1 to apple 1", "go to cabinet 99999999999999999999",
         "go to cabinet_bar__minus_01_dot_20", "(and (not (opened ?r)))", ")(", "take apple from",
         "help", "inventory\x00look", "GoToLocation(agent_1, loc_1)", "use desklamp 1 with desklamp 1"],
    ),
    "ScienceWorld": (
        "scienceworld",
        [
            {"split": "all", "simplification": "easy", "max_turns": 60, "call_timeout_s": 100.0},
            {"split": "all", "simplification": "easy", "ambiguous": "first", "call_timeout_s": 100.0},
        ],
        ["reset task", " Reset\tthe  TASK", "0", "-1", "99999999999", "0 0", "", "None", "task", "help",
         "objects", "wait", "look at door", "focus on", "a the an", "move move to to", "connect to to",
         "teleport to", "teleport to inventory", "focus on inventory", "eat agent", "move agent to agent",
         "pour inventory into inventory", "use agent on agent", "OBJ", "pick up OBJ", "look around\nreset task"],
    ),
    "WebShop": (
        "numpy",
        [
            {"data_dir": None},
            {"data_dir": None, "compat": "upstream", "observation_mode": "text_rich", "goals": "human"},
            {"data_dir": None, "observation_mode": "html", "show_attributes": True},
            {"data_dir": None, "observation_mode": "url", "num_prev_obs": 2, "num_prev_actions": 3},
        ],
        ["search[<a> cotton]", "search[<c>]", "search[<c> ]", "search[<r>]", "search[<q>]", "search[<q> lamps]",
         "click[search]", "search[]", "click[]", "search[ ]", "[]", "click[< Prev]\n", "search[a]b]c",
         "search[search_results item_page item_sub_page done]", "click[buy now] click[buy now]",
         "search[%s {} \\]", "search[' OR 1=1; --]", "search[\x00]", "search[\ud800]", "search[İ ẞ ﬁ ΟΔΟΣ]",
         "[" * 10_000, "x[" * 5_000, "search[" + "a " * 5_000 + "]"],
    ),
    "TextWorld": (
        "textworld",
        [
            {"family": "coin_collector", "settings": {"level": 3}, "num_tasks": 2},
            {"family": "treasure_hunter", "settings": {"level": 3}, "num_tasks": 2},
            {"family": "cooking", "settings": {"recipe": 1, "take": 1, "go": 6, "open": 1, "cook": 1, "cut": 1},
             "num_tasks": 2, "max_turns": None},
            {"family": "custom", "num_tasks": 2},
        ],
        ["\x00", "look\x00", "quit", "q", "restart", "save", "restore", "look. quit", "look, then undo", "undo",
         "again", "oops look", "script", "transcript on", "tw-print", "tw-trace-actions", "tw-extra-infos all",
         "tw-extra-infos description", "actions", "showme me", "\\", "\\x", "\\\\" * 90, "#look", "*look", "@",
         "take all. drop all", "take all but all", "take all. take all. take all", "ask me about me", "verbose",
         "superbrief", "say yes", "yes", "no", "wait. wait. wait. wait", "x me. x me", "open all", "eat all",
         "insert all into all", "give me to me", "me, me", "it, take it", "don't", "\"'", "look; look", "print state"],
    ),
}  # fmt: skip

BLANK = [
    "",
    " ",
    "\n",
    "\t\r\n",
    "\u00a0",
    "\u3000",
    "\ufeff",
    "\x1b[2J",
    "\x00",
    "\x7f",
    "\u202e",
    "\ud800",
    "\udfff",
]
SCRIPTS = [
    "打开 冰箱",
    "открой дверь",
    "افتح الباب",
    "दरवाज़ा खोलो",
    "ドアを開ける",
    "🚪🔑 👩‍🔬",
    "ﬁnd",
    "e\u0301te\u0301",
    "𝔬𝔭𝔢𝔫",
]
LONG = 10_000


def contract(observation, reward, terminated, truncated, info):
    """What every answer of a text environment must be, as a list of what it is not."""
    score, reason = info.get("score"), info.get("done_reason")
    listed = info.get("admissible_actions")
    rules = {
        "the observation is a text of the space": observation in TextSpace(),
        "it can be written as UTF-8": isinstance(observation, str) and utf8(observation),
        "the reward is a number": isinstance(reward, float) and math.isfinite(reward),
        "the flags are booleans": type(terminated) is bool and type(truncated) is bool,
        "no key is missing": set(INFO_KEYS) <= set(info),
        "the score is in 0..1": isinstance(score, float) and 0.0 <= score <= 1.0,
        "success is a boolean, and an end": type(info.get("success")) is bool
        and (terminated or not info["success"]),
        "valid_action is a boolean": type(info.get("valid_action")) is bool,
        "the reason of an end is there at an end only": reason in ((*map(str, DoneReason),) if terminated or truncated
                                                                   else (None,)),
        "turns are counted": type(info.get("turns")) is int and info["turns"] >= 0,
        "task and goal are texts": isinstance(info.get("task"), str) and isinstance(info.get("goal"), str),
        "actions are a list of texts": listed is None
        or (isinstance(listed, list) and all(isinstance(a, str) for a in listed)),
        "the info can be written as JSON": utf8(json.dumps(info, ensure_ascii=False)),
    }  # fmt: skip
    return [rule for rule, holds in rules.items() if not holds]


def utf8(text):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def mutated(rng, action):
    """Something close to a valid action."""
    place = rng.randrange(len(action) + 1)
    words = action.split(" ")
    rng.shuffle(words)
    return rng.choice(
        [
            action[:place] + chr(rng.randrange(0x250)) + action[place:],
            action[:place] + action[place + 1 :],
            action[:place],
            action.upper(),
            " ".join(words),
            f"  {action}\t",
            f"{action} {action}",
            f"{action}. {action}",
            f"{action}\n{rng.choice(BLANK)}",
            action.replace(" ", "  "),
            action + "\x00" + action,
            re.sub(r"\d", "9" * 30, action),
            action * (LONG // max(1, len(action))),
        ]
    )


def valid(rng, info):
    """An action that does something, or has the form of one."""
    if info["admissible_actions"]:
        return rng.choice(info["admissible_actions"])
    template = rng.choice(info.get("action_templates") or ["look"])
    while "OBJ" in template:
        template = template.replace("OBJ", rng.choice(info.get("objects") or ["air"]), 1)
    return template


def any_action(rng, info, crashers):
    """One action of any kind."""
    kind = rng.random()
    if kind < 0.30:
        return valid(rng, info)
    if kind < 0.55:
        return mutated(rng, valid(rng, info))
    if kind < 0.75:
        return rng.choice(crashers)
    if kind < 0.80:
        return rng.choice(BLANK)
    if kind < 0.85:
        return rng.choice(SCRIPTS) * rng.choice([1, 1, 1, 300])
    if kind < 0.88:
        return rng.choice(["x", "open ", "🔑", "\x00", "[", "a.", "\\", "take all. "]) * LONG
    top = rng.choice([0x20, 0x7F, 0x250, 0x3000, 0x110000])
    return "".join(chr(rng.randrange(top)) for _ in range(rng.randrange(1, rng.choice([8, 60, 400]))))


def fuzz(env_id, kwargs, crashers, turns, seed):
    """Play `turns` actions of any kind; counts of what happened."""
    rng = random.Random(seed)
    ends = understood = 0
    pool = SyncEnvPool(
        env_id,
        kwargs,
        step_timeout_s=ANSWER_WITHIN_S,
        reset_timeout_s=600,
        recycle_after=None,
        max_restarts=0,
    )
    with pool, pool.lend(600) as env:
        # Every crasher once, then anything.
        planned = rng.sample(crashers, len(crashers)) if turns >= len(crashers) else []
        over, total = True, 0.0
        for _ in range(turns):
            if over:
                observation, info = env.reset(seed=rng.randrange(1 << 30))
                assert contract(observation, 0.0, False, False, info) == []
                over, total = False, info["score"]
            action = planned.pop() if planned else any_action(rng, info, crashers)
            before = info
            try:
                observation, reward, terminated, truncated, info = env.step(action)
            except PoolError as error:
                pytest.fail(
                    f"{env_id} {kwargs} in {before['task']}, turn {before['turns']}: {action[:300]!r}: {error}"
                )
            total += reward
            broken = contract(observation, reward, terminated, truncated, info)
            if info["turns"] != before["turns"] + 1:
                broken.append("an action is one turn")
            if abs(total - info["score"]) > 1e-6:
                broken.append("rewards add up to the score")
            assert broken == [], (env_id, kwargs, info["task"], action[:300], observation[:300])
            over = terminated or truncated
            ends, understood = ends + over, understood + info["valid_action"]
    assert all(pool.counters[name] == 0 for name in ("deaths", "timeouts", "env_errors"))
    return {"actions": turns, "understood": understood, "ends": ends}


@pytest.mark.env
@pytest.mark.parametrize("turns", [250, pytest.param(5000, marks=FULL)])
@pytest.mark.parametrize("place", PLACES)
def test_no_action_raises_or_hangs_and_every_answer_keeps_the_contract(place, turns, tmp_path, monkeypatch):
    package, ways, crashers = PLACES[place]
    pytest.importorskip(package)
    # Simulators and compiled games of the test's own.
    monkeypatch.setenv("DIVOPD_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if turns < 1000 and place == "TextWorld":
        ways = ways[::2]
    for number, kwargs in enumerate(ways):
        counts = fuzz(f"divopd_gym/{place}-v0", kwargs, crashers, turns // len(ways), seed=number)
        print(place, kwargs, counts)


def test_the_contract_is_one_that_answers_can_break():
    info = {
        "task": "a", "goal": "b", "admissible_actions": ["x"], "score": 0.5, "success": False,
        "valid_action": True, "done_reason": None, "turns": 1,
    }  # fmt: skip
    good = ("seen", 0.5, False, False, info)
    assert contract(*good) == []
    for wrong in (
        ("\ud800", *good[1:]),
        (None, *good[1:]),
        ("seen", math.nan, *good[2:]),
        ("seen", 0.5, 1, False, info),
        (*good[:4], info | {"score": 1.5}),
        (*good[:4], info | {"admissible_actions": [None]}),
        (*good[:4], info | {"success": True}),
        (*good[:4], info | {"done_reason": "success"}),
        (*good[:4], {k: v for k, v in info.items() if k != "turns"}),
    ):
        assert contract(*wrong) != []


def test_actions_of_a_shop_are_read_as_the_benchmarks_pattern_reads_them():
    pattern = re.compile(r"(.+)\[(.+)\]")
    rng = random.Random(0)
    for _ in range(20_000):
        action = "".join(rng.choices("a[]B\n \r\u2028", k=rng.randrange(12)))
        found = pattern.match(action)
        assert parse_action(action) == ((action, None) if found is None else (found[1], found[2].lower())), (
            action
        )


@pytest.mark.timeout(60)
def test_a_long_action_of_brackets_is_read_at_once():
    # The pattern itself takes minutes for it.
    action = "[" * 1_000_000
    assert parse_action(action) == (action, None)
