"""Episodes on record, as text, JSON lines or one HTML page."""

from __future__ import annotations

import html
import json
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gymnasium

__all__ = ["Episode", "EpisodeTurn", "Transcript", "episodes_html"]


@dataclass
class EpisodeTurn:
    """One turn: the action, and what came of it."""

    action: str
    observation: str
    reward: float
    valid: bool


@dataclass
class Episode:
    """One episode from its first observation on.

    Attributes:
        task: Task id.
        goal: The task in words.
        observation: The first observation.
        turns: The turns played.
        score: The last score in 0..1.
        success: Whether the task was solved.
        done_reason: Why the episode ended; None while it goes on.
    """

    task: str | None
    goal: str | None
    observation: str
    turns: list[EpisodeTurn] = field(default_factory=list)
    score: float = 0.0
    success: bool = False
    done_reason: str | None = None

    def text(self) -> str:
        """The episode as one reads it in a terminal."""
        lines = [f"task: {self.task}", f"goal: {self.goal}", "", self.observation]
        for number, turn in enumerate(self.turns, start=1):
            mark = "" if turn.valid else "   (invalid)"
            lines += ["", f"{number}> {turn.action}{mark}", turn.observation]
        lines += ["", self._outcome()]
        return "\n".join(lines)

    def json(self) -> str:
        """The episode as one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)

    def html(self) -> str:
        """The episode as a section of a page."""
        rows = [f"<p class='seen'>{_escape(self.observation)}</p>"]
        for turn in self.turns:
            kind = "act" if turn.valid else "act bad"
            rows.append(
                f"<li><b class='{kind}'>{_escape(turn.action)}</b><p class='seen'>{_escape(turn.observation)}</p></li>"
            )
        head = f"<h2>{_escape(self.task)}</h2><p>{_escape(self.goal)}</p>"
        return (
            f"<section>{head}{rows[0]}<ol>{''.join(rows[1:])}</ol><p>{_escape(self._outcome())}</p></section>"
        )

    def _outcome(self) -> str:
        end = self.done_reason or "not over"
        return f"{'solved' if self.success else 'not solved'}, score {self.score:g}, {len(self.turns)} turns, {end}"


class Transcript(gymnasium.Wrapper, gymnasium.utils.RecordConstructorArgs):
    """Record every episode.

    Args:
        env: A text environment.
        path: JSON-lines file to which each episode is appended when it is over, or given up for the next; None for none.
        keep: Episodes kept in memory.

    Attributes:
        episode: The running, or last, episode; None before the first reset.
        episodes: The last `keep` episodes, the running one included.
    """

    def __init__(self, env: gymnasium.Env, path: str | Path | None = None, keep: int = 100) -> None:
        gymnasium.utils.RecordConstructorArgs.__init__(self, path=path, keep=keep)
        gymnasium.Wrapper.__init__(self, env)
        self.path = None if path is None else Path(path)
        if self.path is not None:
            # Not at the end of the first episode, whose last turn an error would swallow.
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.episode: Episode | None = None
        self.episodes: deque[Episode] = deque(maxlen=keep)
        self._written = True

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[str, dict]:
        """Begin an episode and its record."""
        self._write()
        observation, info = self.env.reset(seed=seed, options=options)
        self.episode = Episode(info.get("task"), info.get("goal"), observation)
        self.episodes.append(self.episode)
        self._written = False
        self._update(info)
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play and record one turn."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        if self.episode is not None:
            valid = bool(info.get("valid_action", True))
            self.episode.turns.append(EpisodeTurn(action, observation, float(reward), valid))
            self._update(info)
            if terminated or truncated:
                self._write()
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Write what is not written yet and close the environment."""
        self._write()
        super().close()

    def to_text(self) -> str:
        """The kept episodes as text."""
        return "\n\n----\n\n".join(episode.text() for episode in self.episodes)

    def to_jsonl(self) -> str:
        """The kept episodes, one line of JSON each."""
        return "".join(episode.json() + "\n" for episode in self.episodes)

    def to_html(self) -> str:
        """The kept episodes as one self-contained page."""
        return episodes_html(self.episodes)

    def _update(self, info: dict[str, Any]) -> None:
        assert self.episode is not None
        self.episode.score = float(info.get("score") or 0.0)
        self.episode.success = bool(info.get("success"))
        reason = info.get("done_reason")
        self.episode.done_reason = None if reason is None else str(getattr(reason, "value", reason))

    def _write(self) -> None:
        if self._written or self.path is None or self.episode is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self.episode.json() + "\n")
        self._written = True


def episodes_html(episodes: Iterable[Episode], title: str = "Episodes") -> str:
    """Episodes as one self-contained page."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:46em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
        "section{border-top:1px solid #8884;padding:.5em 0 1em}h2{font-size:1.05em}li{margin:.6em 0}"
        ".seen{white-space:pre-wrap;margin:.2em 0;opacity:.8}.act{font-family:ui-monospace,monospace}"
        ".bad{text-decoration:underline wavy #c33}"
    )
    sections = "\n".join(episode.html() for episode in episodes)
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{_escape(title)}</title>"
        f"<style>{style}</style></head><body><h1>{_escape(title)}</h1>\n{sections}\n</body></html>\n"
    )


def _escape(text: str | None) -> str:
    # A lone surrogate can be in a Python string but not in a file.
    return html.escape((text or "").encode("utf-8", "replace").decode("utf-8"))
