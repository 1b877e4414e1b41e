"""What is wrong with a config, in words; and how one part of it lies over another."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic import BaseModel


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` on top, section by section."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both_are_sections = isinstance(old, Mapping) and isinstance(value, Mapping)
        result[key] = merged(old, value) if both_are_sections else value  # type: ignore[arg-type]
    return result


def explain(error: pydantic.ValidationError, section: type[BaseModel], prefix: str = "") -> str:
    """Every problem in words: the key, its value and what is allowed, or the nearest key that exists."""
    known = known_keys(section, prefix)
    return "\n".join(_explain_one(problem, known, prefix) for problem in error.errors(include_url=False))


def _explain_one(problem: Any, known: list[str], prefix: str) -> str:
    where = [str(part) for part in problem["loc"]]
    key = prefix + ".".join(where)
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5) or difflib.get_close_matches(
            where[-1], [name.rsplit(".", 1)[-1] for name in known], n=1, cutoff=0.6
        )
        hint = f"; did you mean {_full_name(near[0], known)}?" if near else ""
        return f"unknown key {key}{hint}"
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}" if where else str(problem["ctx"]["error"])
    return f"{key} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _full_name(name: str, known: list[str]) -> str:
    return name if name in known else next(key for key in known if key.rsplit(".", 1)[-1] == name)


def known_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key that can be set, dotted."""
    keys: list[str] = []
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys.extend(known_keys(annotation, f"{prefix}{name}."))
        keys.append(prefix + name)
    return keys
