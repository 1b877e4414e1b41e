"""The machine's own Docker engine, by its command line, and what the tests put there: labelled and swept.

Everything that is made gets a label that names the process that owns it. A test run that was killed cannot
clean up; the next one finds what belongs to no living process and removes it.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psutil

Value = TypeVar("Value")

COMMAND_S = 120.0
OWNER_LABEL = "rookery.swarm-test.owner"
CLOCK_STEP_S = 5.0  # a time of birth moves a little when the clock is set


class CommandFailed(AssertionError):
    """A docker command that ended badly, with everything it said."""


def docker(
    *arguments: str, given: bytes | None = None, timeout_s: float = COMMAND_S, text_of_both: bool = False
) -> str:
    """What `docker ...` prints. A session of its own: the terminal's Ctrl-C is for the test run alone."""
    command = ["docker", *arguments]
    try:
        ended = subprocess.run(
            command,
            check=False,
            input=given or b"",
            capture_output=True,
            timeout=timeout_s,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise CommandFailed("there is no docker command here; these tests need a Docker engine") from None
    except subprocess.TimeoutExpired as error:
        said = _text(error.stdout) + _text(error.stderr)
        raise CommandFailed(f"no end within {timeout_s:.0f} s: {' '.join(command)}\n{said}") from None
    if ended.returncode != 0:
        said = _text(ended.stdout) + _text(ended.stderr)
        raise CommandFailed(f"exit code {ended.returncode}: {' '.join(command)}\n{said}")
    return _text(ended.stdout) + (_text(ended.stderr) if text_of_both else "")


def pipe(source: Sequence[str], target: Sequence[str], timeout_s: float) -> None:
    """`docker SOURCE | docker TARGET`."""
    with subprocess.Popen(
        ["docker", *source],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as giver:
        assert giver.stdout is not None
        assert giver.stderr is not None
        try:
            taker = subprocess.run(
                ["docker", *target],
                check=False,
                stdin=giver.stdout,
                capture_output=True,
                timeout=timeout_s,
                start_new_session=True,
            )
            giver.stdout.close()  # if the taker has given up, the giver has to as well
            said = _text(giver.stderr.read()) + _text(taker.stderr)
            codes = giver.wait(COMMAND_S), taker.returncode
        finally:
            giver.kill()
    if codes != (0, 0):
        commands = f"docker {' '.join(source)} | docker {' '.join(target)}"
        raise CommandFailed(f"exit codes {codes}: {commands}\n{said}")


def wait_for(
    condition: Callable[[], Value],
    what: str,
    timeout_s: float,
    explain: Callable[[], str] = str,
    every_s: float = 0.5,
) -> Value:
    """The condition's first true value; fails with what was waited for, the last value and an explanation."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s: {what} (last: {value!r})\n{explain()}")
        time.sleep(every_s)


# --- who owns what ------------------------------------------------------------------------------------------


def ownership() -> str:
    """The label of what this process makes. A pid may come again; with its time of birth it does not."""
    return f"{OWNER_LABEL}={_name_of(psutil.Process())}"


def sweep_leftovers() -> list[str]:
    """Removes what dead owners left on this engine; returns their names."""
    owners = {_owner_of(kind, name) for kind in _KINDS for name in _labelled(kind, OWNER_LABEL)}
    dead = [owner for owner in owners if not _lives(owner)]
    for owner in dead:
        remove_all(f"{OWNER_LABEL}={owner}")
    return dead


def remove_all(label: str) -> None:
    """Every container, network and volume with this label, whatever state it is in."""
    for container in _labelled("container", label):
        docker("rm", "--force", "--volumes", container)
    for network in _labelled("network", label):
        docker("network", "rm", network)
    for volume in _labelled("volume", label):
        docker("volume", "rm", "--force", volume)


_KINDS = ("container", "network", "volume")


def _labelled(kind: str, label: str) -> list[str]:
    everything = ["--all"] if kind == "container" else []
    return docker(kind, "ls", *everything, "--quiet", "--filter", f"label={label}").split()


def _owner_of(kind: str, name: str) -> str:
    labels = ".Config.Labels" if kind == "container" else ".Labels"
    return docker(kind, "inspect", name, "--format", f'{{{{index {labels} "{OWNER_LABEL}"}}}}').strip()


def _name_of(process: psutil.Process) -> str:
    return f"{socket.gethostname()}/{process.pid}/{process.create_time():.0f}"


def _lives(owner: str) -> bool:
    """Of another machine nothing is known: its things stay."""
    host, pid, born = owner.split("/")
    if host != socket.gethostname():
        return True
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(born)) < CLOCK_STEP_S
    except psutil.NoSuchProcess:
        return False


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")
