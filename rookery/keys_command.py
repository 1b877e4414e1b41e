"""`rookery keys`: who may speak with a run's services beyond this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shared.keys import SERVER_PUBLIC, add_member, make_keys


def add_keys_command(commands: Any) -> None:
    """`rookery keys`."""
    keys = commands.add_parser(
        "keys",
        help="make the keys that services between containers or hosts need",
        description="With security.keys set to their directory every connection is encrypted, and whoever "
        "has no key of the run gets nothing in or out.",
    )
    actions = keys.add_subparsers(required=True, metavar="ACTION")
    make = actions.add_parser("make", help="make what is not there yet; existing keys stay")
    make.add_argument("directory", type=Path, metavar="DIR")
    make.set_defaults(command=make_command)
    add = actions.add_parser("add", help="one more member, with a secret of its own")
    add.add_argument("directory", type=Path, metavar="DIR")
    add.add_argument("name", metavar="NAME", help="who it is for")
    add.set_defaults(command=add_command)


def make_command(options: argparse.Namespace) -> int:
    """`rookery keys make`."""
    made = make_keys(options.directory)
    what = f"made {', '.join(made)}" if made else "all keys are there already"
    print(f"{options.directory}: {what}")
    return 0


def add_command(options: argparse.Namespace) -> int:
    """`rookery keys add`."""
    secret = add_member(options.directory, options.name)
    print(
        f"{secret}: hand it over as member.secret, with {options.directory / SERVER_PUBLIC}; "
        "running services know it at once"
    )
    return 0
