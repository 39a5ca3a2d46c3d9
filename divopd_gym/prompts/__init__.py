"""Prompt styles of the environments: what the model is told, and how its reply becomes an action.

`get_prompt` finds a style by environment id; `register_prompt` adds one.
"""

from divopd_gym.prompts.alfworld import ALFWorldAction, ALFWorldThink, ALFWorldTiny, alias_placing
from divopd_gym.prompts.base import (
    ParsedAction,
    PromptStyle,
    get_prompt,
    history_pairs,
    prompt_styles,
    register_prompt,
)
from divopd_gym.prompts.parsing import match_admissible, parse_bare, parse_tagged
from divopd_gym.prompts.scienceworld import ScienceWorldAction, ScienceWorldThink, ScienceWorldTiny
from divopd_gym.prompts.text import ActionPrompt, ThinkPrompt, TinyPrompt
from divopd_gym.prompts.textworld import TextWorldAction, TextWorldThink, TextWorldTiny
from divopd_gym.prompts.webshop import WebShopAction, WebShopThink, WebShopTiny

__all__ = [
    "ALFWorldAction",
    "ALFWorldThink",
    "ALFWorldTiny",
    "ActionPrompt",
    "ParsedAction",
    "PromptStyle",
    "ScienceWorldAction",
    "ScienceWorldThink",
    "ScienceWorldTiny",
    "TextWorldAction",
    "TextWorldThink",
    "TextWorldTiny",
    "ThinkPrompt",
    "TinyPrompt",
    "WebShopAction",
    "WebShopThink",
    "WebShopTiny",
    "alias_placing",
    "get_prompt",
    "history_pairs",
    "match_admissible",
    "parse_bare",
    "parse_tagged",
    "prompt_styles",
    "register_prompt",
]

for _style in (ThinkPrompt, ActionPrompt, TinyPrompt):
    register_prompt("*", _style.name, _style)
for _style in (ALFWorldThink, ALFWorldAction, ALFWorldTiny):
    register_prompt("divopd_gym/ALFWorld-v0", _style.name, _style)
for _style in (WebShopThink, WebShopAction, WebShopTiny):
    register_prompt("divopd_gym/WebShop-v0", _style.name, _style)
for _style in (ScienceWorldThink, ScienceWorldAction, ScienceWorldTiny):
    register_prompt("divopd_gym/ScienceWorld-v0", _style.name, _style)
for _style in (TextWorldThink, TextWorldAction, TextWorldTiny):
    register_prompt("divopd_gym/TextWorld-v0", _style.name, _style)
