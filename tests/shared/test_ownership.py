"""One process for each directory of state."""

import os
from pathlib import Path

import pytest

from shared import ownership
from shared.errors import ConfigError
from shared.ownership import own


def test_directory_owned_twice_is_refused_with_the_owner(tmp_path: Path, monkeypatch) -> None:
    """The second one learns who has it; when the first lets go, it can be had."""
    monkeypatch.setattr(ownership, "PATIENCE_S", 0.2)
    first = own(tmp_path / "state" / "lock")
    with pytest.raises(ConfigError, match=str(os.getpid())):
        own(tmp_path / "state" / "lock")
    os.close(first)
    os.close(own(tmp_path / "state" / "lock"))
