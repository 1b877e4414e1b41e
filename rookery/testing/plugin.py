"""Stacks for pytest: write `pytest_plugins = ["rookery.testing.plugin"]` into the top conftest.py.

Each test has stacks of its own, removed at its end; if it fails, the logs of all containers are in its report
and, whole, in its tmp_path. Without a Docker engine such tests are skipped with the reason; in CI they fail.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rookery.testing.engine import in_ci, what_is_missing
from shared.errors import RookeryError

if TYPE_CHECKING:  # at run time only when it is needed: without the package docker it cannot be imported
    from rookery.testing.stack import Stack

SHOWN_LINES = 50  # of each container's log, in the report


@dataclass(slots=True)
class StacksOfATest:
    """What a test made, and where its logs go if it fails."""

    directory: Path
    stacks: list[Stack] = field(default_factory=list)


_MADE = pytest.StashKey[StacksOfATest]()


@pytest.fixture
def rookery_stack(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Makes stacks and brings them up: `rookery_stack(scale={"actor": 2})`, with the arguments of `Stack`.

    `up=False` only makes it; `deadline_s` is for its health.
    """
    if missing := what_is_missing():
        (pytest.fail if in_ci() else pytest.skip)(missing)
    from rookery.testing.health import HEALTHY_S  # noqa: PLC0415 - see above
    from rookery.testing.stack import Stack  # noqa: PLC0415

    made = request.node.stash[_MADE] = StacksOfATest(tmp_path)
    with ExitStack() as removals:

        def make(*arguments: Any, up: bool = True, deadline_s: float = HEALTHY_S, **options: Any) -> Stack:
            stack = Stack(*arguments, **options)
            removals.callback(stack.remove)
            made.stacks.append(stack)
            if up:
                stack.up(deadline_s)
            return stack

        yield make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the logs of a failed test's stacks to its report, while they are still there."""
    test_report = yield
    if test_report.failed and test_report.when != "teardown" and _MADE in item.stash:
        made = item.stash[_MADE]
        for stack in made.stacks:
            test_report.sections.append((f"logs of {stack.project}", _kept_logs(stack, made.directory)))
    return test_report


def _kept_logs(stack: Stack, directory: Path) -> str:
    """Writes all logs into files; returns their ends, or why there are none."""
    kept = directory / f"{stack.project}-logs"
    kept.mkdir()
    shown = [f"whole logs in {kept}"]
    try:
        for container in stack.containers():
            log = container.logs()
            (kept / f"{container.name}.log").write_text(log)
            state = f"{container.status}, health {container.health}, {container.restarts} restarts"
            shown += [f"--- {container.name} ({state})", *log.splitlines()[-SHOWN_LINES:]]
    except RookeryError as error:  # the test's own failure is the one to be seen
        shown.append(f"no more logs: {error}")
    return "\n".join(shown)
