"""What can go wrong with a stack. Errors carry whole reports, because they end up in the output of tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from docker.errors import APIError, DockerException
from requests.exceptions import RequestException

from shared.errors import RookeryError


class StackError(RookeryError):
    """Docker or Compose could not do what was asked; the message has their reason."""


class Unhealthy(StackError):
    """Containers did not become healthy; the message says which, why, and how their logs end."""


class CommandFailed(StackError):
    """A command in a container ended with something else than 0."""

    def __init__(self, command: str, where: str, code: int, output: str) -> None:
        super().__init__(f"{command!r} in {where} ended with {code}:\n{output.rstrip() or '(no output)'}")
        self.code = code
        self.output = output


@contextmanager
def told_by_the_engine(what: str) -> Iterator[None]:
    """Turns the SDK's errors into a StackError that begins with what was tried."""
    try:
        yield
    except APIError as error:
        raise StackError(f"{what}: {error.explanation or error}") from error
    except (DockerException, RequestException) as error:
        raise StackError(f"{what}: no answer from the Docker engine: {error}") from error
