"""What a replay service wrote down of its run, so that it comes back without asking anybody."""

from __future__ import annotations

import json
from pathlib import Path

import pydantic

from shared.logs import get_logger
from shared.specs import AgentSpec

log = get_logger()

Specs = dict[str, AgentSpec]

_SPECS: pydantic.TypeAdapter[Specs] = pydantic.TypeAdapter(Specs)


def read_known_run(path: Path) -> tuple[str, Specs] | None:
    """The run's id and its agents; None: nothing is known, or nothing that can be read."""
    try:
        known = json.loads(path.read_text())
        return known["run"], _SPECS.validate_python(known["specs"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        log.warning(
            "what replay knew of its run is unreadable; asking the parameter server", reason=str(error)
        )
        return None


def write_known_run(path: Path, run: str, specs: Specs) -> None:
    """All of it or nothing."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"run": run, "specs": _SPECS.dump_python(specs, mode="json")}))
    temporary.replace(path)
