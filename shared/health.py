"""`python -m shared.health`: asks the service in this container whether it is ready.

Exit code 0: ready, or standing by. 1: it answers that it is not, or not at all; the reason is printed. It
loads nothing but Python's own modules, because a health check is a new process every time.

The other end: shared/health_socket.py
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from typing import Any

PATH_VARIABLE = "ROOKERY_RUN__HEALTH_SOCKET"
TIMEOUT_S = 3.0


def ask(path: str) -> dict[str, Any]:
    """What the service says of itself; OSError or ValueError where it says nothing."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(TIMEOUT_S)
        connection.connect(path)
        with connection.makefile("rb") as answer:
            said: dict[str, Any] = json.loads(answer.read())
    return said


def main(arguments: list[str] | None = None) -> int:
    """The check; its exit code is the answer."""
    parser = argparse.ArgumentParser(prog="python -m shared.health", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "socket", nargs="?", default=os.environ.get(PATH_VARIABLE, ""), help=f"default: ${PATH_VARIABLE}"
    )
    parser.add_argument("--alive", action="store_true", help="ask only whether it answers at all")
    options = parser.parse_args(arguments)
    if not options.socket:
        print(f"no socket to ask at: set {PATH_VARIABLE}", file=sys.stderr)
        return 1
    try:
        said = ask(options.socket)
    except (OSError, ValueError) as error:
        print(f"no answer at {options.socket}: {error}")
        return 1
    print(said["words"])
    return 0 if options.alive or said["ready"] else 1


if __name__ == "__main__":
    sys.exit(main())
