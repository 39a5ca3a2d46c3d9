import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from divopd_gym.errors import ConfigError
from divopd_gym.prompts import (
    PromptStyle,
    ThinkPrompt,
    alias_placing,
    get_prompt,
    history_pairs,
    prompt_styles,
    register_prompt,
)

ALF = "divopd_gym/ALFWorld-v0"
STYLES = ("think", "action", "tiny")
ROOM = "You are in the middle of a room. Looking quickly around you, you see a bed 1, and a desk 1."
FIRST = f"-= Welcome to TextWorld, ALFRED! =-\n\n{ROOM}\n\nYour task is to: put a CD in safe."
INFO = {"goal": "put a CD in safe.", "admissible_actions": ["go to bed 1", "go to desk 1", "help", "look"]}
MOVE = {"goal": "g", "admissible_actions": ["go to bed 1", "move cd 1 to desk 1"]}
PUT = {"goal": "g", "admissible_actions": ["go to bed 1", "put cd 1 in/on desk 1"]}


@pytest.mark.parametrize("env_id", [ALF, f"divopd_gym:{ALF}", "someone/Else-v3"])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_is_a_prompt_style_and_pickles(env_id, style):
    prompt = get_prompt(env_id, style)
    assert isinstance(prompt, PromptStyle)
    assert prompt.name == style
    assert pickle.loads(pickle.dumps(prompt)) == prompt


@pytest.mark.parametrize("style", STYLES)
def test_what_a_style_writes_it_reads_back(style):
    prompt = get_prompt(ALF, style)
    for action in ("go to bed 1", "move cd 1 to desk 1", "look"):
        parsed = prompt.parse(prompt.reply(action), INFO)
        assert (parsed.action, parsed.valid, parsed.why) == (action, True, None)


@pytest.mark.parametrize("env_id", [ALF, "someone/Else-v3"])
@pytest.mark.parametrize("style", STYLES)
@given(reply=st.text(), info=st.sampled_from([None, {}, INFO, MOVE, {"admissible_actions": None}]))
def test_parsers_never_raise_on_arbitrary_text(env_id, style, reply, info):
    for options in ({}, {"alias": True}) if env_id == ALF else ({},):
        parsed = get_prompt(env_id, style, **options).parse(reply, info)
        assert isinstance(parsed.action, str)
        assert parsed.valid == (parsed.why is None)
        assert "\n" not in parsed.action


@pytest.mark.parametrize("style", STYLES)
@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<action>", "</action>", "a", " ", "\n", "<", "\ud800"])
    )
)
def test_parsers_never_raise_on_broken_tags(style, parts):
    parsed = get_prompt(ALF, style).parse("".join(parts))
    assert parsed.valid == (parsed.why is None)


@pytest.mark.parametrize(
    ("reply", "action", "why"),
    [
        ("<think>hm</think><action>Go To  Bed 1</action>", "go to bed 1", None),
        ("<action>look</action>", "look", None),
        ("<ACTION>look</ACTION>", "look", None),
        ("<think>maybe <action>look</action>?</think>\n<action>go to bed 1</action>", "go to bed 1", None),
        ("<action>look</action><action>help</action>", "look", None),
        ("<action>\n'go to bed 1'\n</action>", "go to bed 1", None),
        ("<action>go to bed 1.</action>", "go to bed 1", None),
        ("<think>x</think><action>go to bed 1\n", "go to bed 1", "unclosed_action_tag"),
        ("I would rather like to GO TO BED 1", "uld rather like to go to bed 1", "no_action_tag"),
        ("<think>x</think><action> </action>", "think><action> </action>", "empty_action"),
        ("", "", "no_action_tag"),
    ],
)
def test_think_replies_are_read_by_the_convention(reply, action, why):
    parsed = get_prompt(ALF, "think").parse(reply, INFO)
    assert parsed.why == why
    assert parsed.valid == (why is None)
    assert parsed.action == action if why != "empty_action" else parsed.action.endswith("</action>")


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("go to bed 1", "go to bed 1"),
        ("\n  > Go to bed 1\nthen I sleep", "go to bed 1"),
        ("Action: `look`", "look"),
        ("<think>\nlook around\n</think>\n\ngo to bed 1.", "go to bed 1"),
        ("<think></think><action>look</action>", "look"),
    ],
)
def test_bare_replies_tolerate_labels_quotes_and_thinking(reply, action):
    parsed = get_prompt(ALF, "action").parse(reply, INFO)
    assert (parsed.action, parsed.valid) == (action, True)


def test_prose_without_an_end_is_cut_and_flagged():
    parsed = get_prompt(ALF, "action").parse("word " * 500)
    assert (parsed.valid, parsed.why) == (False, "too_long")
    assert len(parsed.action) <= 300


def test_think_message_holds_role_task_turns_last_two_pairs_observation_and_quoted_actions_without_help():
    history = [("o-one", "a-one"), ("o-two", "a-two"), ("o-three", "a-three")]
    text = get_prompt(ALF, "think").user(3, "You arrive at bed 1.", INFO, history)
    assert "household" in text
    assert "Your task is to: put a CD in safe." in text
    assert "Turns taken so far: 3." in text
    assert "o-one" not in text
    assert text.index("[turn 2]") < text.index("o-two") < text.index("a-two") < text.index("[turn 3]")
    assert text.index("a-three") < text.index("You arrive at bed 1.")
    assert "'go to bed 1',\n'go to desk 1',\n'look'" in text
    assert "help" not in text
    assert "<action>" in text


@pytest.mark.parametrize("style", STYLES)
def test_banner_is_dropped_and_task_stands_once_in_a_first_message(style):
    text = get_prompt(ALF, style).user(0, FIRST, INFO, [])
    assert "Welcome" not in text
    assert text.lower().count("put a cd in safe.") == 1
    assert "a bed 1, and a desk 1." in text


@pytest.mark.parametrize("style", STYLES)
def test_task_is_found_in_the_observation_where_info_has_none(style):
    assert "put a cd in safe." in get_prompt(ALF, style).user(0, FIRST, {}, []).lower()


def test_tiny_messages_are_the_observation_then_the_goal():
    prompt = get_prompt(ALF, "tiny")
    assert prompt.system(INFO) is None
    assert prompt.user(0, FIRST, INFO, []) == "a bed 1, and a desk 1.\nput a cd in safe."
    later = prompt.user(1, "You arrive at Bed 1.\n\nOn it, you see nothing.", INFO, [(FIRST, "go to bed 1")])
    assert later == "you arrive at bed 1.\non it, you see nothing.\nput a cd in safe."


@pytest.mark.parametrize("style", STYLES)
def test_window_of_n_shows_the_last_n_pairs_however_many_are_handed_over(style):
    history = [(f"seen{i} here", f"did{i}") for i in range(6)]
    for n in (0, 1, 3, 6):
        text = get_prompt(ALF, style, history=f"window:{n}").user(6, "now", INFO, history)
        assert [i for i in range(6) if f"seen{i}" in text] == list(range(6 - n, 6))
        assert [i for i in range(6) if f"did{i}" in text] == list(range(6 - n, 6))


@pytest.mark.parametrize("style", ["action", "tiny"])
def test_accumulated_chat_is_not_repeated_by_short_styles(style):
    text = get_prompt(ALF, style, history="accumulate").user(1, "now", INFO, [("before", "did")])
    assert "before" not in text


def test_grammar_of_placing_comes_from_the_environment():
    prompt = get_prompt(ALF, "think")
    assert "'move cd 1 to desk 1'" in prompt.user(0, "o", MOVE, [])
    assert "'put cd 1 in/on desk 1'" in prompt.user(0, "o", PUT, [])
    for style in STYLES:
        bare = get_prompt(ALF, style).user(0, "o", {"goal": "g", "admissible_actions": ["look"]}, [])
        assert "move" not in bare and "in/on" not in bare


def test_action_templates_are_shown_where_no_action_is_listed():
    info = {"goal": "g", "admissible_actions": None, "action_templates": ["open OBJ", "pour OBJ into OBJ"]}
    for style in ("think", "action"):
        assert "pour OBJ into OBJ" in get_prompt("someone/Else-v3", style).user(0, "o", info, [])


@pytest.mark.parametrize(
    ("action", "admissible", "sent"),
    [
        ("put cd 1 in/on desk 1", MOVE["admissible_actions"], "move cd 1 to desk 1"),
        ("put cd 1 on desk 1", MOVE["admissible_actions"], "move cd 1 to desk 1"),
        ("move cd 1 to desk 1", PUT["admissible_actions"], "put cd 1 in/on desk 1"),
        ("put cd 1 in/on desk 1", PUT["admissible_actions"], "put cd 1 in/on desk 1"),
        ("put cd 1 in/on desk 1", None, "move cd 1 to desk 1"),
        ("put cd 2 in/on desk 1", MOVE["admissible_actions"], "put cd 2 in/on desk 1"),
        ("look", MOVE["admissible_actions"], "look"),
    ],
)
def test_alias_gives_the_wording_that_is_admissible(action, admissible, sent):
    assert alias_placing(action, admissible) == sent


@pytest.mark.parametrize("style", STYLES)
def test_alias_is_off_unless_asked_for(style):
    reply = get_prompt(ALF, style).reply("put cd 1 in/on desk 1")
    assert get_prompt(ALF, style).parse(reply, MOVE).action == "put cd 1 in/on desk 1"
    assert get_prompt(ALF, style, alias=True).parse(reply, MOVE).action == "move cd 1 to desk 1"


def test_other_environments_keep_the_case_of_actions():
    assert (
        get_prompt("someone/Else-v3").parse("<action>search[Red Shoes]</action>").action
        == "search[Red Shoes]"
    )


@pytest.mark.parametrize(("form", "pairs"), [("accumulate", None), ("window:0", 0), ("window:12", 12)])
def test_history_forms(form, pairs):
    assert history_pairs(form) == pairs


@pytest.mark.parametrize("form", ["window", "window:-1", "window:x", "all", ""])
def test_unknown_history_form_is_refused_with_the_known_ones(form):
    with pytest.raises(ConfigError, match="accumulate.*window:n"):
        get_prompt(ALF, "think", history=form)


def test_unknown_style_option_and_pairs_are_refused():
    with pytest.raises(ConfigError, match="'loud'.*action, think, tiny"):
        get_prompt(ALF, "loud")
    with pytest.raises(ConfigError, match="volume"):
        get_prompt(ALF, "think", volume=3)
    with pytest.raises(ConfigError, match="pairs"):
        get_prompt(ALF, "think", pairs=-1)


def test_a_registered_style_is_found_by_its_environment_only():
    register_prompt("mine/Env-v0", "mine", ThinkPrompt)
    assert "mine" in prompt_styles("mine/Env-v0")
    assert "mine" not in prompt_styles(ALF)


@pytest.mark.env
def test_styles_fit_the_real_environment_and_its_grammar():
    pytest.importorskip("textworld")
    import gymnasium

    import divopd_gym  # noqa: F401  (registers the ids)

    env = gymnasium.make(ALF, split="generated", family="tiny")
    observation, info = env.reset(seed=3)
    prompts = {style: get_prompt(ALF, style) for style in STYLES}
    tiny = prompts["tiny"].user(0, observation, info, [])
    room, goal = tiny.split("\n")
    assert goal == info["goal"].lower()
    assert room.startswith("a ") and room in observation
    expert, past = env.unwrapped.expert(), []
    expert.reset(observation, info)
    for turn in range(30):
        shown = prompts["think"].user(turn, observation, info, past)
        assert all(f"'{a}'" in shown for a in info["admissible_actions"] if a != "help")
        assert "'help'" not in shown
        action = expert.act()
        for prompt in prompts.values():
            parsed = prompt.parse(prompt.reply(action), info)
            assert (parsed.action, parsed.valid) == (action, True)
        past.append((observation, action))
        observation, _, terminated, truncated, info = env.step(action)
        expert.observe(action, observation, info)
        if terminated or truncated:
            break
    assert info["success"]


def test_scienceworlds_tiny_messages_hold_the_whole_task():
    goal = "Your task is to find a(n) plant. First, focus on the thing. Then, move it to the red box in the kitchen."
    text = get_prompt("divopd_gym/ScienceWorld-v0", "tiny").user(3, "You wait.", {"goal": goal}, [])
    assert "find a(n) plant" in text and "red box in the kitchen" in text


def test_tiny_replies_are_in_the_letters_of_tiny_messages():
    assert get_prompt("divopd_gym/WebShop-v0", "tiny").reply("search[Buy a Lamp]") == "search[buy a lamp]"
