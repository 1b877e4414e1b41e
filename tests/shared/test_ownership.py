"""One process for each directory of state."""

import os
from pathlib import Path

import pytest

from shared import ownership
from shared.errors import ConfigError
from shared.ownership import own, owned, owner_of


def test_directory_owned_twice_is_refused_with_the_owner(tmp_path: Path, monkeypatch) -> None:
    """The second one learns who has it; when the first lets go, it can be had."""
    monkeypatch.setattr(ownership, "PATIENCE_S", 0.2)
    first = own(tmp_path / "state" / "lock")
    with pytest.raises(ConfigError, match=str(os.getpid())):
        own(tmp_path / "state" / "lock")
    os.close(first)
    os.close(own(tmp_path / "state" / "lock"))


def test_owner_of_a_file_is_named_as_long_as_it_lives(tmp_path: Path) -> None:
    """Looking does not take it away from anybody."""
    path = tmp_path / "state" / "lock"
    assert owner_of(path) == ""
    with owned(path):
        assert owner_of(path) == owner_of(path) == str(os.getpid())
    assert owner_of(path) == ""
    with owned(path):
        assert owner_of(path)
