"""The `docker` command of this machine, with deadlines and errors that tell everything it said."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

COMMAND_S = 120.0


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


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")
