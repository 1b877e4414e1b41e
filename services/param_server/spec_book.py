"""Every agent's spec, as the first actor registered it. Owns the spec file.

Later registrations must say the same; one that differs is refused with the agent, the field and both values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from services.param_server.atomic_file import remove_leftover, write_atomic
from shared.errors import BrokenInvariant, Refused
from shared.specs import AgentSpec

_SPECS: pydantic.TypeAdapter[dict[str, AgentSpec]] = pydantic.TypeAdapter(dict[str, AgentSpec])


class SpecBook:
    """`specs` is empty until somebody has registered them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftover(path)
        self.specs: dict[str, AgentSpec] = _read(path)

    def register(self, specs: Mapping[str, AgentSpec]) -> bool:
        """True: stored, these are the first. False: the same as before. Refused: not the same."""
        if not specs:
            raise Refused("spec_mismatch", "a registration without agents")
        if not self.specs:
            write_atomic(self._path, _SPECS.dump_json(dict(specs)))
            self.specs = dict(specs)
            return True
        if problem := _first_difference(self.specs, specs):
            raise Refused("spec_mismatch", f"{problem}; all actors of a run must build the same world")
        return False


def _first_difference(known: Mapping[str, AgentSpec], offered: Mapping[str, AgentSpec]) -> str:
    if known.keys() != offered.keys():
        missing, extra = sorted(known.keys() - offered.keys()), sorted(offered.keys() - known.keys())
        return f"agents differ: {missing} missing, {extra} not known; registered are {sorted(known)}"
    for agent, spec in known.items():
        was, now = spec.model_dump(mode="json"), offered[agent].model_dump(mode="json")
        for name, old, new in _differences(was, now):
            return f"agent {agent!r}, {name}: {new!r} where {old!r} is registered"
    return ""


def _differences(known: dict[str, Any], offered: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name, old in known.items():
        new = offered[name]
        same_fields = isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys()
        if same_fields:
            for inner, old_value, new_value in _differences(old, new):
                yield f"{name}.{inner}", old_value, new_value
        elif old != new:
            yield name, old, new


def _read(path: Path) -> dict[str, AgentSpec]:
    try:
        return _SPECS.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except pydantic.ValidationError as error:
        raise BrokenInvariant(
            f"{path.name} is damaged ({error.error_count()} problems); remove it to let actors register again"
        ) from None
