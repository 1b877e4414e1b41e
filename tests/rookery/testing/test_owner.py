"""Owners of stacks: told apart from others of the same number, and known to be dead only if they are."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rookery.testing import owner
from rookery.testing.owner import Owner


@pytest.fixture(params=["proc", "ps"])
def _either_source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where a system has no /proc, `ps` is asked."""
    if request.param == "ps":
        monkeypatch.setattr(owner, "PROC", tmp_path)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing until its input ends."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def owner_of(pid: int) -> Owner:
    started = owner._started(pid)
    assert started is not None
    return replace(Owner.this_process(), pid=pid, started=started)


@pytest.mark.usefixtures("_either_source")
def test_owner_survives_its_label_and_lives() -> None:
    """The label is all that others see of it."""
    me = Owner.this_process()
    assert me.pid == os.getpid()
    assert Owner.from_label(me.label) == me
    assert not me.is_dead


@pytest.mark.usefixtures("_either_source")
def test_killed_owner_is_dead_also_before_its_parent_has_waited_for_it(
    child: subprocess.Popen[bytes],
) -> None:
    """A zombie still has a number and a start, but removes nothing any more."""
    other = owner_of(child.pid)
    assert not other.is_dead
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert other.is_dead
    child.wait()
    assert other.is_dead


@pytest.mark.usefixtures("_either_source")
def test_owner_whose_number_belongs_to_another_process_now_is_dead() -> None:
    """Numbers are used again; starts are not."""
    assert replace(Owner.this_process(), started="some other time").is_dead


def test_owner_of_another_host_is_never_judged() -> None:
    """Its processes cannot be seen from here."""
    assert not replace(Owner.this_process(), host="elsewhere", started="some other time").is_dead


@pytest.mark.parametrize("label", ["", "me", "host 12", "host twelve yesterday"])
def test_label_of_somebody_else_is_no_owner(label: str) -> None:
    """What we did not write we do not touch."""
    assert Owner.from_label(label) is None
