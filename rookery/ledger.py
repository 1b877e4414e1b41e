"""The ledger of a run: every step that was played, and what became of it. `rookery ledger RUN`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rookery.arguments import add_run_argument
from rookery.client import RunClient
from rookery.run_directory import open_run
from shared.messages import Ledger

NAMES = ("produced", "stored", "in_flight", "abandoned", "duplicates_dropped", "stored_twice", "lost")


def add_up(
    ledgers: Sequence[Ledger], heard: Mapping[str, int], living: Collection[str] = ()
) -> dict[str, int]:
    """The ledgers of all replay services as one.

    `heard` is what actors told the parameter server, by incarnation. An actor may have told it of more steps
    than replay: those were produced too. They are on their way if the actor is among the `living`; one that
    was killed has abandoned them.
    """
    total = {name: sum(getattr(ledger, name) for ledger in ledgers) for name in NAMES}
    for incarnation, steps in heard.items():
        told_replay = sum(ledger.produced_by.get(incarnation, 0) for ledger in ledgers)
        more = max(0, steps - told_replay)
        total["produced"] += more
        total["in_flight" if incarnation in living else "abandoned"] += more
    return total


def add_ledger_command(commands: Any) -> None:
    """`rookery ledger`."""
    ledger = commands.add_parser(
        "ledger",
        help="every step of a running run, and what became of it",
        description="produced is what actors count, stored what replay counts. in_flight is on its way, "
        "abandoned went down with actors that died; lost and stored_twice must be 0.",
    )
    add_run_argument(ledger)
    ledger.add_argument("--json", action="store_true", help="print JSON")
    ledger.set_defaults(command=ledger_command)


def ledger_command(options: argparse.Namespace) -> int:
    """`rookery ledger`."""
    with RunClient(open_run(options.run).config()) as client:
        ledger = add_up(client.ledgers(), client.produced(), client.living_actors())
    if options.json:
        print(json.dumps(ledger, indent=2))
    else:
        print("\n".join(f"{name:<20}{value:>14,}" for name, value in ledger.items()))
    return 0
