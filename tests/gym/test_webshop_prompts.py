"""Prompt styles of WebShop."""

import gymnasium
import pytest

import divopd_gym  # noqa: F401
from divopd_gym.prompts import get_prompt

ID = "divopd_gym/WebShop-v0"


def turns(mode="text"):
    """The turns of an expert's episode: observation, info, action."""
    env = gymnasium.make(ID, num_products=60, observation_mode=mode)
    observation, info = env.reset(options={"task": "1"})
    expert = env.unwrapped.expert()
    expert.reset(observation, info)
    while not info["done_reason"]:
        action = expert.act()
        yield observation, info, action
        observation, _, _, _, info = env.step(action)
        expert.observe(action, observation, info)
    assert info["success"]


@pytest.mark.parametrize("style", ["think", "action", "tiny"])
@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_a_reply_is_parsed_back_to_its_action(style, mode):
    prompt = get_prompt(ID, style, "accumulate")
    for _, info, action in turns(mode):
        parsed = prompt.parse(prompt.reply(action), info)
        assert parsed.valid and parsed.action.lower() == action.lower()


@pytest.mark.parametrize("style", ["think", "action", "tiny"])
@pytest.mark.parametrize("mode", ["text", "text_rich"])
def test_the_request_is_said_once_and_last_before_the_reply_of_the_tiny_form(style, mode):
    prompt = get_prompt(ID, style, "accumulate")
    for turn, (observation, info, _) in enumerate(turns(mode)):
        message = prompt.user(turn, observation, info, [])
        assert message.lower().count(info["goal"].lower()) == 1
        assert style != "tiny" or message.endswith(info["goal"].lower())


def test_searching_is_offered_as_a_form_and_clicks_as_they_are():
    prompt = get_prompt(ID, "action")
    pages = list(turns())
    assert "search[<your query>]" in prompt.user(0, *pages[0][:2], [])
    later = prompt.user(1, *pages[1][:2], [])
    assert "search[" not in later.split("Possible actions: ")[1] and "click[back to search]" in later


def test_the_tiny_form_names_every_product_and_option_by_what_must_be_clicked():
    prompt = get_prompt(ID, "tiny", "accumulate")
    for observation, info, _ in turns():
        message = prompt.user(0, observation, info, [])
        if info["page"] in ("results", "item"):
            fixed = ("back to search", "< prev", "next >", "description", "features", "reviews", "buy now")
            for name in info["available_actions"]["clickables"]:
                assert name in fixed or name in message
        for value in info["options"].values():
            assert f"chosen: {'; '.join(info['options'].values())}" in message and value in message


@pytest.mark.parametrize("style", ["think", "action", "tiny"])
def test_nothing_said_raises(style):
    prompt = get_prompt(ID, style)
    for reply in ("", "]", "<action>", "search[", "<action>click[]</action>", "\x00" * 400, "a" * 10_000):
        assert isinstance(prompt.parse(reply, None).action, str)
