"""WebShop as a Gymnasium environment: an instruction, a shop of texts, and one purchase."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from divopd_gym.core import DoneReason, Expert, Outcome, TextEnv, package_version
from divopd_gym.envs.webshop.expert import ShopExpert, gold_path, queries
from divopd_gym.envs.webshop.generated import DEFAULT_PRODUCTS
from divopd_gym.envs.webshop.goals import KINDS, PRICE_SEED, SPLITS, Goal
from divopd_gym.envs.webshop.html import html_page
from divopd_gym.envs.webshop.nouns import NounTagger, get_tagger
from divopd_gym.envs.webshop.prepare import generated_store, get_store
from divopd_gym.envs.webshop.shop import Shop
from divopd_gym.envs.webshop.site import COMPAT, MODES, Answer, Visit
from divopd_gym.errors import ConfigError

__all__ = ["GoalIds", "WebShopEnv"]


class GoalIds(Sequence[str]):
    """Goal indices as texts, however many there are.

    Args:
        indices: the indices; a range or an array.
    """

    def __init__(self, indices: range | np.ndarray):
        self._indices = indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            return [str(int(index)) for index in self._indices[place]]
        return str(int(self._indices[place]))

    def __iter__(self) -> Iterator[str]:
        return (str(int(index)) for index in self._indices)

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, str) or not re.fullmatch("0|[1-9][0-9]{0,17}", task):
            return False
        if isinstance(self._indices, range):
            return int(task) in self._indices
        return bool(np.any(self._indices == int(task)))


class WebShopEnv(TextEnv):
    """Buy the product that the instruction describes.

    Actions are ``search[words]`` and ``click[text]``; anything else costs a turn and is flagged by
    ``info["valid_action"] = False``. Buying ends the episode; the score is the benchmark's reward, success is 1.

    The info has, besides the common keys: ``available_actions`` (``has_search_bar`` and ``clickables``), ``page``
    (index, results, item, sub, done), ``asin`` of the product shown, ``options`` chosen, ``url``, ``goal_index``,
    ``tagger``, and after a purchase ``reward_details``.

    Args:
        data_dir: folder of the benchmark's files; None shops in a generated catalogue.
        goals: ``synthetic`` or ``human``.
        compat: ``fixed``, or ``upstream`` for the benchmark with its quirks.
        observation_mode: ``text``, ``text_rich``, ``html`` or ``url``.
        split: ``all``, or the benchmark's ``test`` (goals 0-499), ``eval`` (500-1499), ``train`` (the rest).
        size: ``small`` or ``full`` catalogue of `data_dir`; None takes the full one if it is there.
        num_products: only this many listings; of a generated catalogue, its size (300).
        catalogue_seed: of a generated catalogue.
        goal_seed: of prices and price caps; the default gives the published goals.
        filter_goals: keeps the goals for which it holds, given index and `Goal`.
        tagger: finds the nouns of titles: ``spacy:MODEL``, ``file:NOUNS.json#MODEL``, ``catalogue``, or an object.
            None is ``catalogue`` for a generated one and ``spacy:en_core_web_sm`` else.
        index_dir: where the search index lies; else the user's cache.
        show_attributes: whether product pages offer the products' attributes.
        num_prev_obs: how many past observations an observation repeats.
        num_prev_actions: how many past actions it repeats.
        max_turns: turns after which an episode is truncated; None for no limit.
        render_mode: None or ``ansi``.

    Raises:
        ConfigError: an argument that cannot work, an index that does not fit, a missing noun model.
        DataNotFoundError: the data is missing, or a large catalogue was not prepared.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        *,
        goals: str = "synthetic",
        compat: str = "fixed",
        observation_mode: str = "text",
        split: str = "all",
        size: str | None = None,
        num_products: int | None = None,
        catalogue_seed: int = 0,
        goal_seed: int = PRICE_SEED,
        filter_goals: Callable[[int, Goal], bool] | None = None,
        tagger: str | NounTagger | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        show_attributes: bool = False,
        num_prev_obs: int = 0,
        num_prev_actions: int = 0,
        max_turns: int | None = 30,
        render_mode: str | None = None,
    ):
        super().__init__(max_turns=max_turns, render_mode=render_mode)
        _one_of("goals", goals, KINDS)
        _one_of("compat", compat, COMPAT)
        _one_of("observation_mode", observation_mode, MODES)
        _one_of("split", split, SPLITS)
        for name, count in (("num_prev_obs", num_prev_obs), ("num_prev_actions", num_prev_actions)):
            if count < 0:
                raise ConfigError(f"{name}={count}; give 0 or more")
        self.compat, self.observation_mode, self.split = compat, observation_mode, split
        self._attributes = show_attributes
        self._past = (num_prev_obs, num_prev_actions)
        if data_dir is None:
            tagger = "catalogue" if tagger is None else tagger
            count = DEFAULT_PRODUCTS if num_products is None else num_products
            store = generated_store(count, catalogue_seed)
        else:
            tagger = "spacy:en_core_web_sm" if tagger is None else tagger
            store = get_store(data_dir, size, num_products, index_dir)
        self._shop = Shop(store, get_tagger(tagger), goals, goal_seed)
        self._tasks = self._choose(split, filter_goals)
        self._visit: Visit | None = None

    def _choose(self, split: str, keep: Callable[[int, Goal], bool] | None) -> GoalIds:
        first, end = SPLITS[split]
        goals = self._shop.goals
        indices: range | np.ndarray = range(len(goals))[first:end]
        if keep is not None:
            indices = np.array([i for i in indices if keep(i, goals[i])], dtype=np.int64)
        if not len(indices):
            raise ConfigError(
                f"no goals are left: this catalogue has {len(goals):,} {goals.kind} goals, split={split!r} takes those "
                f"from {first} on"
                + (" and filter_goals keeps none" if keep else "")
                + "; choose another split"
            )
        return GoalIds(indices)

    @property
    def shop(self) -> Shop:
        """The shop: products, search, goals."""
        return self._shop

    @property
    def tasks(self) -> Sequence[str]:
        """Ids: the goals' indices as texts."""
        return self._tasks

    @property
    def visit(self) -> Visit:
        """The running visit.

        Raises:
            ResetNeeded: no task was started.
        """
        self._running()
        return self._visit

    def goal(self, task: str) -> Goal:
        """The goal of a task.

        Raises:
            ConfigError: there is no such goal.
        """
        return self._shop.goals[int(task)]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """See `TextEnv.reset`; ``options={"goal_index": i}`` names the task by a number, NumPy's too."""
        self._task = None
        options = dict(options or {})
        if "goal_index" in options:
            index = options.pop("goal_index")
            try:
                number = operator.index(index)
            except TypeError as error:
                raise ConfigError(f"goal_index={index!r}; give a whole number") from error
            options["task"] = str(self._shop.goals[number].index)
        task = options.get("task")
        if isinstance(task, str) and re.fullmatch("0|[1-9][0-9]{0,17}", task):
            # Its message says how many goals there are.
            self._shop.goals[int(task)]
        return super().reset(seed=seed, options=options)

    def _start(self, task: str, seed: int, options: dict[str, Any]) -> tuple[str, Outcome]:
        if options:
            raise ConfigError(
                f"reset options {sorted(options)} are unknown; WebShop knows 'task' and 'goal_index'"
            )
        goal = self.goal(task)
        self._visit = Visit(
            self._shop, goal, task, compat=self.compat, attributes=self._attributes, seed=seed
        )
        now = self._observation()
        self._observations, self._actions = [now], []
        return goal.text, self._outcome(Answer(True), now)

    def _play(self, action: str) -> Outcome:
        # A half of a surrogate pair is no character: addresses and repeated actions could not be written as UTF-8.
        action = action.encode("utf-8", "replace").decode("utf-8")
        answer = self._visit.act(action)
        now = self._observation()
        self._actions.append(action)
        text = self._with_past(now)
        self._observations.append(now)
        return self._outcome(answer, text)

    def _observation(self) -> str:
        visit = self._visit
        if self.observation_mode == "text":
            return visit.text()
        if self.observation_mode == "text_rich":
            return visit.rich()
        if self.observation_mode == "url":
            return visit.url
        return html_page(visit.page, visit.clicked)

    def _with_past(self, now: str) -> str:
        observations, actions = self._past
        texts = [now]
        for back in range(1, 1 + max(observations, actions)):
            if back <= min(actions, len(self._actions)):
                texts.append(self._actions[-back])
            if back <= min(observations, len(self._observations)):
                texts.append(self._observations[-back])
        return " [SEP] ".join(reversed(texts))

    def _outcome(self, answer: Answer, text: str) -> Outcome:
        visit = self._visit
        available = visit.available()
        score = answer.reward if answer.done else 0.0
        extra: dict[str, Any] = {
            "available_actions": available,
            "page": visit.page.name,
            "asin": None if visit.page.product is None else visit.page.product.asin,
            "options": visit.options,
            "url": visit.url,
            "goal_index": visit.goal.index,
            "tagger": self._shop.tagger.name,
        }
        if answer.done:
            extra["reward_details"] = dict(visit.details)
        success = answer.done and score == 1.0
        return Outcome(
            observation=text[: self.observation_space.max_length],
            score=float(score),
            over=answer.done,
            success=success,
            valid_action=answer.valid,
            admissible_actions=self._admissible(available),
            done_reason=None if not answer.done or success else str(DoneReason.FAILURE),
            extra=extra,
        )

    def _admissible(self, available: dict[str, Any]) -> list[str]:
        """Every click, and where there is a search field, the search that anybody could make: for the goal."""
        names = [f"click[{name}]" for name in available["clickables"] if name != "search"]
        if available["has_search_bar"]:
            names.insert(0, f"search[{queries(self._visit.goal)[0]}]")
        # The odd text with a line break or without a lower case of its own cannot be clicked.
        return [name for name in names if self._visit.understands(name)]

    def gold_path(self) -> list[str] | None:
        """Actions that earn the full reward in the running task; None where the target cannot be found or earn it.

        Raises:
            ResetNeeded: no task was started.
        """
        self._running()
        return gold_path(self._shop, self._visit.goal, self.compat)

    def expert(self) -> Expert:
        """A fresh `ShopExpert`; it knows the target of each goal."""
        return ShopExpert(self._shop, self.goal)

    def versions(self) -> dict[str, str]:
        """Packages, noun tagger and fingerprint of the catalogue."""
        return {
            **super().versions(),
            "tagger": self._shop.tagger.name,
            "spacy": package_version("spacy"),
            "data": self._shop.store.fingerprint[:16],
        }

    def close(self) -> None:
        """Forget the running visit."""
        self._visit = None
        self._task = None
        super().close()


def _one_of(name: str, value: str, choices) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r}; choose one of {', '.join(choices)}")
