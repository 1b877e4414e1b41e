"""The keys of a run: who may speak with its services once they listen beyond this machine.

A directory with four small files. Services that listen prove with `server.secret` who they are, which
everybody checks against `server.public`. Everybody proves membership with `member.secret`; who belongs
stands in `members.public`, a line for each. Services that only connect need `server.public` and
`member.secret`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq

from shared.errors import ConfigError

SERVER_SECRET = "server.secret"  # noqa: S105 - a file's name
SERVER_PUBLIC = "server.public"
MEMBER_SECRET = "member.secret"  # noqa: S105 - a file's name
MEMBERS_PUBLIC = "members.public"
KEY_LENGTH = 40  # characters of Z85


@dataclass(frozen=True, slots=True)
class KeyPair:
    """What one side of a connection proves itself with."""

    public: bytes
    secret: bytes

    @classmethod
    def of(cls, secret: bytes) -> KeyPair:
        return cls(zmq.curve_public(secret), secret)


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys that this process can use, read from their directory."""

    directory: Path
    server_public: bytes
    member: KeyPair

    def server(self) -> KeyPair:
        """For sockets that listen."""
        return KeyPair.of(_read_key(self.directory / SERVER_SECRET))

    def members(self) -> Mapping[bytes, str]:
        """Who belongs, by public key; read anew each time, so that one more can be added to a running run."""
        path = self.directory / MEMBERS_PUBLIC
        members = {}
        for number, line in enumerate(_read(path).splitlines(), 1):
            key, _space, name = line.partition(" ")
            members[_checked(key, f"{path}, line {number}")] = name
        return members


def read_keys(directory: Path) -> Keys:
    """The keys in this directory, or ConfigError that says which are missing and how to make them."""
    return Keys(
        directory,
        _read_key(directory / SERVER_PUBLIC),
        KeyPair.of(_read_key(directory / MEMBER_SECRET)),
    )


def make_keys(directory: Path) -> list[str]:
    """Makes what is not there yet; never touches a secret that is. Returns the names of the new files."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = [name for name in (SERVER_SECRET, MEMBER_SECRET) if _make_secret(directory / name)]
    public_files = {
        SERVER_PUBLIC: KeyPair.of(_read_key(directory / SERVER_SECRET)).public.decode() + "\n",
        MEMBERS_PUBLIC: KeyPair.of(_read_key(directory / MEMBER_SECRET)).public.decode() + " services\n",
    }
    for name, text in public_files.items():
        if not (directory / name).exists():
            _write(directory / name, text, 0o644)
            made.append(name)
    return made


def add_member(directory: Path, name: str) -> Path:
    """One more who belongs. Returns the file of its secret, to be handed over with server.public."""
    if not name.isidentifier():
        raise ConfigError(f"{name!r}: a member's name is letters, digits and _, for example ada")
    keys = read_keys(directory)
    if name in keys.members().values():
        raise ConfigError(f"{directory / MEMBERS_PUBLIC} has a member {name!r} already; choose another name")
    path = directory / f"{name}.secret"
    _make_secret(path)
    public = KeyPair.of(_read_key(path)).public.decode()
    members = directory / MEMBERS_PUBLIC
    _write(members, members.read_text().rstrip("\n") + f"\n{public} {name}\n", 0o644)
    return path


def _make_secret(path: Path) -> bool:
    if path.exists():
        return False
    _public, secret = zmq.curve_keypair()
    _write(path, secret.decode() + "\n", 0o600)
    return True


def _write(path: Path, text: str, mode: int) -> None:
    """All of it or nothing: a start that is interrupted here leaves no half a key."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}") from None


def _read_key(path: Path) -> bytes:
    return _checked(_read(path).strip(), str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise ConfigError(
            f"the key file {path} is missing; `rookery keys make {path.parent}` makes a run's keys, "
            "and all its services need the same ones"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(f"cannot read the key file {path}: {reason}") from None


def _checked(text: str, where: str) -> bytes:
    key = text.encode()
    if len(key) != KEY_LENGTH:
        raise ConfigError(f"{where}: a key has {KEY_LENGTH} characters, this has {len(key)}")
    return key
