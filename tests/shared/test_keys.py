"""The key files: made once, never overwritten, and errors that say which file and why."""

from pathlib import Path

import pytest
import zmq

from rookery import cli
from shared.errors import ConfigError
from shared.keys import (
    MEMBER_SECRET,
    MEMBERS_PUBLIC,
    SERVER_PUBLIC,
    SERVER_SECRET,
    add_member,
    make_keys,
    read_keys,
)


def test_made_keys_belong_together(tmp_path: Path) -> None:
    """The public halves are those of the secrets, and the services are members."""
    assert make_keys(tmp_path / "keys") == [SERVER_SECRET, MEMBER_SECRET, SERVER_PUBLIC, MEMBERS_PUBLIC]
    keys = read_keys(tmp_path / "keys")
    assert keys.server().public == keys.server_public
    assert keys.members() == {keys.member.public: "services"}
    assert keys.server_public != keys.member.public


def test_secrets_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()}
    assert modes[SERVER_SECRET] == modes[MEMBER_SECRET] == 0o600
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700


def test_making_again_keeps_what_is_there(tmp_path: Path) -> None:
    """Every start of a stack makes keys; only the first may make new ones."""
    make_keys(tmp_path)
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert make_keys(tmp_path) == []
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


def test_making_after_an_interruption_completes_the_rest(tmp_path: Path) -> None:
    """Whatever is missing is derived from the secrets that are there."""
    make_keys(tmp_path)
    before = read_keys(tmp_path)
    (tmp_path / SERVER_PUBLIC).unlink()
    (tmp_path / MEMBERS_PUBLIC).unlink()
    assert make_keys(tmp_path) == [SERVER_PUBLIC, MEMBERS_PUBLIC]
    assert read_keys(tmp_path) == before


def test_added_member_has_a_secret_of_its_own(tmp_path: Path) -> None:
    make_keys(tmp_path)
    secret = add_member(tmp_path, "ada")
    keys = read_keys(tmp_path)
    assert sorted(keys.members().values()) == ["ada", "services"]
    public = zmq.curve_public(secret.read_text().strip().encode())
    assert keys.members()[public] == "ada"


def test_member_names_are_taken_once(tmp_path: Path) -> None:
    make_keys(tmp_path)
    add_member(tmp_path, "ada")
    with pytest.raises(ConfigError, match="has a member 'ada' already"):
        add_member(tmp_path, "ada")
    with pytest.raises(ConfigError, match="letters, digits and _"):
        add_member(tmp_path, "../ada")


@pytest.mark.parametrize("missing", [SERVER_PUBLIC, MEMBER_SECRET])
def test_missing_key_is_named_with_the_remedy(tmp_path: Path, missing: str) -> None:
    make_keys(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ConfigError, match=f"{missing} is missing; `rookery keys make"):
        read_keys(tmp_path)


def test_service_that_only_connects_needs_no_server_secret(tmp_path: Path) -> None:
    """So it cannot play the server for others."""
    make_keys(tmp_path)
    (tmp_path / SERVER_SECRET).unlink()
    (tmp_path / MEMBERS_PUBLIC).unlink()
    keys = read_keys(tmp_path)
    with pytest.raises(ConfigError, match=f"{SERVER_SECRET} is missing"):
        keys.server()


@pytest.mark.parametrize("text", ["", "short", "x" * 41, "\N{SNOWMAN}" * 40])
def test_damaged_key_is_refused_by_name(tmp_path: Path, text: str) -> None:
    make_keys(tmp_path)
    (tmp_path / MEMBER_SECRET).write_text(text)
    with pytest.raises(ConfigError, match=f"{MEMBER_SECRET}: a key has 40 characters"):
        read_keys(tmp_path)


def test_damaged_members_file_names_the_line(tmp_path: Path) -> None:
    make_keys(tmp_path)
    with (tmp_path / MEMBERS_PUBLIC).open("a") as file:
        file.write("oops ada\n")
    with pytest.raises(ConfigError, match=f"{MEMBERS_PUBLIC}, line 2: a key has 40 characters, this has 4"):
        read_keys(tmp_path).members()


def test_commands_make_and_add(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "set_up_logging", lambda *_names: None)
    directory = str(tmp_path / "keys")
    assert cli.main(["keys", "make", directory]) == 0
    assert cli.main(["keys", "make", directory]) == 0
    assert cli.main(["keys", "add", directory, "ada"]) == 0
    out = capsys.readouterr().out
    assert "made server.secret, member.secret, server.public, members.public" in out
    assert "all keys are there already" in out
    assert f"{directory}/ada.secret: hand it over as member.secret" in out
