"""The settings that say where servers are, checked before anything is asked of them. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from divopd_gym.errors import ConfigError

__all__ = ["STUDENT_URL", "TEACHER_URL", "by_label", "check_addresses", "check_url"]

STUDENT_URL = "http://127.0.0.1:8000"
TEACHER_URL = "http://127.0.0.1:8001"


def check_url(url: str, field: str) -> str:
    """A server's address without a trailing slash or ``/v1``.

    Raises:
        ConfigError: It is none, or carries a password, which would be written into the run directory.
    """
    parts = urlsplit(url if isinstance(url, str) else "")
    if parts.username or parts.password:
        raise ConfigError(
            f"{field} has an address with a user or password in it ({parts.scheme}://...@{parts.hostname}); it would "
            "be written into the run directory. Put the key into the environment variable VLLM_API_KEY."
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(
            f"{field} has {url!r}; expected the address of a vLLM server such as {STUDENT_URL}."
        )
    return url.rstrip("/").removesuffix("/v1")


def by_label(urls: Sequence[str], field: str = "teacher_urls") -> dict[str, list[str]]:
    """Addresses by the teacher that answers there; "" is the main one.

    Args:
        urls: ``http://...`` for the main teacher, ``label=http://...`` for one of ``teachers``.
        field: Setting they come from.
    """
    found: dict[str, list[str]] = {}
    for entry in urls:
        label, equals, url = str(entry).partition("=")
        if not equals or "/" in label:
            label, url = "", entry
        found.setdefault(label, []).append(check_url(url, field))
    return found


def check_addresses(config: Any) -> None:
    """Refuse what servers cannot do, and addresses that do not fit the models.

    Args:
        config: A `DivOPDConfig`.

    Raises:
        ConfigError: The first thing that is wrong.
    """
    given = [name for name in ("student_urls", "teacher_urls", "eval_urls") if getattr(config, name)]
    if config.engine != "vllm":
        if given:
            raise ConfigError(
                f"{given[0]} is set, but engine is {config.engine!r}, which asks no server. Set engine to vllm."
            )
        return
    for name in ("student_urls", "eval_urls"):
        urls = [check_url(url, name) for url in getattr(config, name) or ()]
        _check_unique(name, urls)
    labels = by_label(config.teacher_urls or ())
    for urls in labels.values():
        _check_unique("teacher_urls", urls)
    wanted = set(config.teachers)
    if unknown := sorted(set(labels) - wanted - {""}):
        raise ConfigError(
            f"teacher_urls has addresses of {', '.join(map(repr, unknown))}, but teachers has "
            f"{', '.join(map(repr, wanted)) or 'none'}. Add the label to teachers, or remove it."
        )
    if missing := sorted(wanted - set(labels)):
        raise ConfigError(
            f"teachers has {', '.join(map(repr, missing))}, but teacher_urls has no address of it. Add "
            f"'{missing[0]}=http://host:port'."
        )
    if not 0.01 <= config.temperature <= 2:
        raise ConfigError(
            f"temperature is {config.temperature}, but vLLM samples at 0.01 to 2 only. Choose one of these, or engine: "
            "local."
        )
    if config.teacher_temperature != 1.0:
        raise ConfigError(
            f"teacher_temperature is {config.teacher_temperature}, but vLLM scores given tokens at 1 whatever it is "
            "told. Leave teacher_temperature null."
        )
    if config.divergence == "multi_sample_reverse_kl":
        raise ConfigError(
            "divergence multi_sample_reverse_kl draws several tokens a position, but a vLLM server draws one. Set "
            "divergence to sampled_reverse_kl, or engine to local."
        )
    if config.teacher_overlap < 0:
        raise ConfigError(f"teacher_overlap is {config.teacher_overlap}; expected 0 or more tokens.")


def _check_unique(name: str, urls: list[str]) -> None:
    if twice := sorted({url for url in urls if urls.count(url) > 1}):
        raise ConfigError(
            f"{name} has {twice[0]} twice; one server is one replica. Remove one, or start another server."
        )
