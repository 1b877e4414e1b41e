"""Whether containers are well, and if not, why: in words that a failed test can be understood by."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rookery.testing.errors import Unhealthy

if TYPE_CHECKING:
    from rookery.testing.container import Container

HEALTHY_S = 60.0
LOOK_S = 0.1  # between two looks at the engine's state
TAIL_LINES = 20


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with a container, and whether it cannot get better by itself."""

    text: str
    is_final: bool


def trouble_in(attributes: dict[str, Any], may_have_finished: bool) -> Trouble | None:
    """What the engine's description of a container shows; None: it is well. Some do their work and end."""
    state, check = attributes["State"], check_of(attributes)
    status = state["Status"]
    if status == "running":
        is_well = check.get("Status", "healthy") == "healthy"
        return None if is_well else Trouble(f"running, {_told_by(check)}", is_final=False)
    if may_have_finished and _has_finished(attributes):
        return None
    facts = [status]
    if status != "created":
        facts.append(f"exit code {state['ExitCode']}")
    if attributes["RestartCount"]:
        facts.append(f"restarted {attributes['RestartCount']} times")
    if state["OOMKilled"]:
        facts.append("out of memory")
    if state["Error"]:
        facts.append(state["Error"])
    return Trouble(", ".join(facts), is_final=status in {"exited", "dead"})


def check_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """The state of the health check; empty where there is none."""
    return attributes["State"].get("Health") or {}


def wait_until_well(
    containers: Callable[[], Sequence[Container]], deadline_s: float, may_have_finished: bool
) -> None:
    """Returns when all are well; raises Unhealthy when time is over, or as soon as one has ended for good."""
    deadline = time.monotonic() + deadline_s
    while True:
        looked_at = containers()
        ill = troubles_of(looked_at, may_have_finished)
        if not ill:
            return
        if any(trouble.is_final for trouble in ill.values()) or time.monotonic() > deadline:
            raise Unhealthy(report(ill, len(looked_at)))
        time.sleep(LOOK_S)


def troubles_of(containers: Sequence[Container], may_have_finished: bool) -> dict[Container, Trouble]:
    """Those that are not well."""
    looked_at = {container: trouble_in(container.look(), may_have_finished) for container in containers}
    return {container: trouble for container, trouble in looked_at.items() if trouble}


def report(ill: dict[Container, Trouble], number: int) -> str:
    """Each container that is not well with its trouble and the end of its log."""
    lines = [f"{len(ill)} of {number} containers are not healthy:"]
    for container, trouble in ill.items():
        log = container.logs(tail=TAIL_LINES).splitlines() or ["(it wrote nothing)"]
        lines += [f"- {container.name}: {trouble.text}", "  its log ends with:"]
        lines += [f"    {line}" for line in log]
    return "\n".join(lines)


def _told_by(check: dict[str, Any]) -> str:
    """A health check that does not say healthy, in words."""
    tries = check["Log"] or []
    if not tries:
        return f"health {check['Status']}: its health check has not run yet"
    said = tries[-1]["Output"].strip() or "(nothing)"
    failures = f"{check['FailingStreak']} failures in a row"
    code = tries[-1]["ExitCode"]
    return f"health {check['Status']}, {failures}; the last check (exit code {code}) said: {said}"


def _has_finished(attributes: dict[str, Any]) -> bool:
    """It did its work and ended, as it was meant to: nothing would start it again."""
    policy, state = attributes["HostConfig"]["RestartPolicy"]["Name"], attributes["State"]
    return policy in {"", "no", "on-failure"} and state["Status"] == "exited" and state["ExitCode"] == 0
