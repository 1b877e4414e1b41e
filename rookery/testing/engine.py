"""Is there a Docker engine with Compose? Said in words, because tests are skipped or fail with them.

In CI (the variable CI is `true`) tests fail without an engine: skipped ones would look like passed ones.
`python -m rookery.testing.engine` says what is missing and exits 1, or exits 0 in silence.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys

ANSWER_S = 20.0
INSTALL = "install Docker Engine and its compose plugin (https://docs.docker.com/engine/install/)"


def in_ci() -> bool:
    """CI systems set CI=true."""
    return os.environ.get("CI") == "true"


@functools.cache
def what_is_missing() -> str | None:
    """What stacks need and this machine does not have, and how to get it; None if everything is there."""
    if importlib.util.find_spec("docker") is None:
        return "stacks need the Python package docker: pip install 'rookery[testing]'"
    if shutil.which("docker") is None:
        return f"stacks need the docker command, which is not on the PATH: {INSTALL}"
    if _complaint_of("compose", "version") is not None:
        return f"stacks need Docker Compose, but `docker compose version` fails: {INSTALL}"
    complaint = _complaint_of("version", "--format", "{{.Server.Version}}")
    if complaint is not None:
        return (
            "stacks need a Docker engine and none answers: start it (systemctl start docker, Docker Desktop) "
            f"or join the group docker if you may not use it. `docker version` says: {complaint}"
        )
    return None


def _complaint_of(*arguments: str) -> str | None:
    """Why this docker command fails, or None if it does not."""
    try:
        answer = subprocess.run(  # noqa: S603 - fixed arguments
            ["docker", *arguments],  # noqa: S607 - whichever docker the user has on the PATH
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {ANSWER_S:.0f} s"
    return None if answer.returncode == 0 else answer.stderr.strip() or f"exit code {answer.returncode}"


if __name__ == "__main__":
    sys.exit(what_is_missing())
