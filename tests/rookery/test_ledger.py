"""The ledger of a run: replay's counts, and what only the parameter server heard of."""

from rookery.ledger import add_up
from shared.messages import Ledger

CLEAN, KILLED = "a" * 32, "b" * 32


def make_ledger(produced: int, stored: int, produced_by: dict[str, int]) -> Ledger:
    return Ledger(
        produced=produced,
        stored=stored,
        in_flight=0,
        abandoned=produced - stored,
        duplicates_dropped=1,
        stored_twice=0,
        lost=0,
        produced_by=produced_by,
    )


def test_ledgers_of_several_replays_are_summed():
    """Two replay services keep different agents of the same actor; nothing is counted twice."""
    ledgers = [make_ledger(100, 100, {CLEAN: 100}), make_ledger(50, 40, {CLEAN: 50})]
    total = add_up(ledgers, {CLEAN: 150})
    assert (total["produced"], total["stored"], total["abandoned"]) == (150, 140, 10)
    assert total["duplicates_dropped"] == 2


def test_steps_that_only_the_parameter_server_heard_of_are_abandoned():
    """A killed actor's last heartbeat may be newer than its last report to replay."""
    total = add_up([make_ledger(130, 120, {CLEAN: 100, KILLED: 30})], {CLEAN: 100, KILLED: 37})
    assert (total["produced"], total["stored"], total["abandoned"]) == (137, 120, 17)


def test_steps_that_only_replay_heard_of_stay_as_they_are():
    """And the other way round: replay may know of more than the last heartbeat said."""
    total = add_up([make_ledger(130, 120, {KILLED: 130})], {KILLED: 90})
    assert (total["produced"], total["abandoned"]) == (130, 10)
