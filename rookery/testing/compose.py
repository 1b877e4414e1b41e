"""The `docker compose` command for one project.

The files that a user gives are read once, by Compose itself; what comes out is made the stack's own: names
others could have too are taken away, everything carries the owner's label, the engine chooses host ports.
Every later command reads this from its standard input, so there is no file to be left behind.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery.testing.errors import StackError

OWNER_LABEL = "rookery.testing.owner"
READ_S = 30.0  # for reading files; nothing is started
GIVE_UP_S = 10.0  # for a command that was told to end
Spec = dict[str, Any]


class ComposeFailed(StackError):
    """`docker compose` ended with something else than 0."""

    def __init__(self, arguments: Sequence[str], code: int, output: str, errors: str) -> None:
        said = errors.strip() or output.strip() or "(it said nothing)"
        super().__init__(f"`docker compose {' '.join(arguments)}` ended with {code}:\n{said}")
        self.code = code
        self.output = output
        self.errors = errors


class Overdue(StackError):
    """`docker compose` did not end in time, and was ended."""


class Compose:
    """One project, and the commands that Compose runs for it."""

    def __init__(self, project: str, spec: Spec, profiles: Sequence[str]) -> None:
        self._head = ["--project-name", project, *(part for name in profiles for part in ("--profile", name))]
        self._spec = spec

    @property
    def services(self) -> list[str]:
        return sorted(self._spec["services"])

    def set_scale(self, service: str, number: int) -> None:
        """How many containers the service has from the next command on."""
        if service not in self._spec["services"]:
            raise StackError(
                f"there is no service {service!r} to scale; there are {', '.join(self.services)}"
            )
        self._spec["services"][service].pop("scale", None)  # what it said must not contradict the new number
        self._spec["services"][service].setdefault("deploy", {})["replicas"] = number

    def call(self, *arguments: str, deadline_s: float) -> str:
        """The output of a command that ends in time and well."""
        command = ["docker", "compose", *self._head, "--file", "-", *arguments]
        return _call(command, arguments, json.dumps(self._spec), deadline_s, _environment({}))


def read_files(files: Sequence[Path], project: str, variables: Mapping[str, str]) -> Spec:
    """What Compose makes of these files: merged, with variables filled in, paths absolute, all profiles."""
    for file in files:
        if not file.is_file():
            raise StackError(f"there is no compose file {file}; give others with files=[...]")
    arguments = ["config", "--format", "json"]
    command = ["docker", "compose", "--project-name", project, "--profile", "*"]
    command += [part for file in files for part in ("--file", str(file))]
    spec: Spec = json.loads(_call([*command, *arguments], arguments, "", READ_S, _environment(variables)))
    return spec


def made_own(spec: Spec, project: str, owner: str, environment: Mapping[str, str]) -> Spec:
    """The same services, such that any number of such projects can run on one engine at the same time."""
    own = copy.deepcopy(spec)
    for service in own["services"].values():
        service.pop("container_name", None)
        _label(service, owner)
        service["environment"] = (service.get("environment") or {}) | {
            name: value.replace("$", "$$") for name, value in environment.items()
        }
        for port in service.get("ports", ()):
            port.pop("published", None)
    for kind in ("networks", "volumes"):
        for key, thing in own.get(kind, {}).items():
            if not thing.get("external"):
                thing["name"] = f"{project}_{key}"
                _label(thing, owner)
    return own


def _label(thing: Spec, owner: str) -> None:
    thing["labels"] = (thing.get("labels") or {}) | {OWNER_LABEL: owner}


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would tell Compose to take another project or other files."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
    return inherited | dict(variables)


def _call(
    command: Sequence[str], shown: Sequence[str], text: str, deadline_s: float, environment: Mapping[str, str]
) -> str:
    process = subprocess.Popen(  # noqa: S603 - the user's own compose files and commands
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,  # the terminal's Ctrl-C is for us alone: this must end before we clean up
    )
    with process:
        try:
            output, errors = process.communicate(text, timeout=deadline_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise Overdue(
                f"`docker compose {' '.join(shown)}` did not end within {deadline_s:.0f} s"
            ) from None
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        raise ComposeFailed(shown, process.returncode, output, errors)
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the command and its plugin, so that nothing is created any more when this returns."""
    try:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=GIVE_UP_S)
    except subprocess.TimeoutExpired:
        pass  # killed below
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
