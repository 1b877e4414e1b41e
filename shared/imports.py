"""Importing what a config names as "package.module:name", with errors that say in words why it cannot be.

Only ever called with names from the run's own config: nothing that arrives over the wire is imported.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from shared.errors import ConfigError


def is_place(text: str) -> bool:
    """Whether this is written "package.module:name"."""
    module_name, colon, attribute = text.partition(":")
    return bool(colon and module_name and attribute)


def import_named(place: str, setting: str, *, users: str, wanted: str = "") -> Any:
    """What `place` names. `setting` begins each error, `users` says who must be able to import it."""
    module_name, _colon, attribute = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, TypeError) as error:  # TypeError: a relative name
        raise ConfigError(
            f"{setting}: importing {module_name} failed ({error}); "
            f"is it installed, or its folder in PYTHONPATH, for {users}?"
        ) from error
    found = getattr(module, attribute, None)
    if found is None:
        raise ConfigError(
            f"{setting}: module {module_name} has no {attribute!r}"
            f"{nearest(attribute, vars(module))}{' ' + wanted if wanted else ''}"
        )
    return found


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that may have been meant, as the end of a sentence."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else "."
