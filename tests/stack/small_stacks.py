"""Compose files of small, quick services, for the tests of stacks themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

IMAGE = "python:3.11-slim"
Service = dict[str, Any]


def service(command: str, **more: Any) -> Service:
    """A service that runs a line of shell."""
    return {
        "image": IMAGE,
        "init": True,
        "command": ["sh", "-c", command],
        "stop_grace_period": "1s",
        **more,
    }


def check(command: str) -> dict[str, Any]:
    """A health check that is asked all the time."""
    return {"test": ["CMD-SHELL", command], "interval": "300ms", "timeout": "5s", "retries": 2}


def idle(**more: Any) -> Service:
    """Runs until it is told to end."""
    return service("echo started; exec sleep 100000", **more)


def web(**more: Any) -> Service:
    """Says its mark to whoever asks over http."""
    serve = (
        "mkdir /tmp/www; echo $$MARK > /tmp/www/mark; exec python -m http.server --directory /tmp/www 8000"
    )
    look = "import urllib.request as u; u.urlopen('http://localhost:8000/mark', timeout=3)"
    return service(serve, healthcheck=check(f'python -c "{look}"'), **more)


ASK_WEB = [
    "python",
    "-c",
    "import urllib.request as u; print(u.urlopen('http://web:8000/mark', timeout=2).read().decode().strip())",
]


def never_healthy(**more: Any) -> Service:
    """Runs, says why it is not healthy, and never becomes so."""
    return service(
        "echo I have no specs; exec sleep 100000",
        healthcheck=check("echo waiting for the first actor; exit 1") | {"retries": 1000},
        **more,
    )


def compose_file(directory: Path, services: dict[str, Service], **more: Any) -> Path:
    """The services as a compose file of their own."""
    path = directory / "compose.yaml"
    path.write_text(yaml.safe_dump({"services": services, **more}))
    return path
