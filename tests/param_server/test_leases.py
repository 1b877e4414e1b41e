from __future__ import annotations

from pathlib import Path

import pytest

from services.param_server.leases import LeaseBook
from shared.errors import BrokenInvariant, Refused, StaleToken
from shared.messages import Token

LEASE_S = 10.0
AGENTS = ("a", "b")
ONE, TWO, THREE = ("1" * 32, "2" * 32, "3" * 32)


def open_book(tmp_path: Path, now: float = 0.0) -> LeaseBook:
    return LeaseBook(tmp_path / "leases.json", LEASE_S, lambda: now)


def token(agent: str, number: int) -> Token:
    return Token(agent=agent, number=number)


def test_learner_lease_for_each_agent_goes_to_one_holder(tmp_path: Path) -> None:
    """Two learners share two agents; a third one waits."""
    book = open_book(tmp_path)
    assert book.grant_learner(AGENTS, "l1", ONE, None, 0) == token("a", 1)
    assert book.grant_learner(AGENTS, "l2", TWO, None, 0) == token("b", 1)
    assert book.grant_learner(AGENTS, "l3", THREE, None, 0) is None
    assert book.tokens(0) == {"a": 1, "b": 1}
    holder = book.holder("a")
    assert holder is not None
    assert (holder.instance, holder.incarnation, holder.token) == ("l1", ONE, token("a", 1))


def test_learner_request_repeated_gives_the_same_lease(tmp_path: Path) -> None:
    """Also after a restart, and after it lapsed with nobody else there."""
    book = open_book(tmp_path)
    assert book.grant_learner(AGENTS, "l1", ONE, "b", 0) == token("b", 1)
    assert book.grant_learner(AGENTS, "l1", ONE, "b", 1) == token("b", 1)
    assert book.grant_learner(AGENTS, "l1", ONE, None, 2) == token("b", 1)
    book = open_book(tmp_path, 3)
    assert book.grant_learner(AGENTS, "l1", ONE, "b", 3) == token("b", 1)
    book.expire(100)
    assert book.grant_learner(AGENTS, "l1", ONE, "b", 100) == token("b", 1)
    assert book.tokens(100) == {"b": 1}


def test_learner_request_for_a_particular_agent_waits_or_is_refused(tmp_path: Path) -> None:
    """Held: None. Unknown: an error that says what there is."""
    book = open_book(tmp_path)
    book.grant_learner(AGENTS, "l1", ONE, "a", 0)
    assert book.grant_learner(AGENTS, "l2", TWO, "a", 0) is None
    with pytest.raises(Refused, match=r"'z' is not one of \['a', 'b'\]"):
        book.grant_learner(AGENTS, "l2", TWO, "z", 0)


def test_learner_request_prefers_an_agent_without_a_silent_holder(tmp_path: Path) -> None:
    """A holder that is only late gets its chance to come back."""
    book = open_book(tmp_path)
    book.grant_learner(AGENTS, "l1", ONE, "a", 0)
    assert book.grant_learner(AGENTS, "l2", TWO, None, LEASE_S) == token("b", 1)
    assert book.renew(ONE, token("a", 1), None, LEASE_S + 1)


def test_lease_that_lapsed_goes_to_another_and_fences_the_old_holder(tmp_path: Path) -> None:
    """A paused learner that wakes up can neither renew nor publish."""
    book = open_book(tmp_path)
    old = book.grant_learner(["a"], "l1", ONE, None, 0)
    assert old is not None
    book.check(old)
    assert book.grant_learner(["a"], "l2", TWO, None, LEASE_S - 0.1) is None
    assert [lease.token for lease in book.expire(LEASE_S)] == [old]
    assert book.holder("a") is None
    book.check(old)
    new = book.grant_learner(["a"], "l2", TWO, None, LEASE_S)
    assert new == token("a", 2)
    with pytest.raises(StaleToken, match="token 1 of agent 'a' was replaced by 2"):
        book.check(old)
    assert not book.renew(ONE, old, None, LEASE_S)
    assert book.renew(TWO, new, None, LEASE_S)


def test_lease_renewed_after_it_lapsed_lives_again_if_nobody_took_it(tmp_path: Path) -> None:
    """And this too survives a restart: the revived lease is not given away."""
    book = open_book(tmp_path)
    own = book.grant_learner(["a"], "l1", ONE, None, 0)
    book.expire(LEASE_S)
    assert book.tokens(LEASE_S) == {"a": 0}
    assert book.renew(ONE, own, None, 30)
    assert book.tokens(30) == {"a": 1}
    book = open_book(tmp_path, 31)
    assert book.grant_learner(["a"], "l2", TWO, None, 31) is None


def test_restart_grants_no_held_lease_for_one_lease_time(tmp_path: Path) -> None:
    """The holder may renew meanwhile; the monotonic clock may have begun anew."""
    own = open_book(tmp_path, 5000).grant_learner(["a"], "l1", ONE, None, 5000)
    book = open_book(tmp_path, 7)
    assert book.grant_learner(["a"], "l2", TWO, None, 7 + LEASE_S - 0.1) is None
    assert book.renew(ONE, own, None, 8)
    assert book.grant_learner(["a"], "l2", TWO, None, 17) is None
    assert book.grant_learner(["a"], "l2", TWO, None, 18) == token("a", 2)


def test_restart_after_a_lapse_was_seen_leaves_the_agent_free(tmp_path: Path) -> None:
    """Nobody waits for a holder that is known to be silent."""
    book = open_book(tmp_path)
    book.grant_learner(["a"], "l1", ONE, None, 0)
    book.expire(LEASE_S)
    assert open_book(tmp_path, 0).grant_learner(["a"], "l2", TWO, None, 0) == token("a", 2)


def test_release_frees_at_once_and_cannot_be_renewed(tmp_path: Path) -> None:
    """The launcher gives back what a dead process held; the number still rises."""
    book = open_book(tmp_path)
    own = book.grant_learner(["a"], "l1", ONE, None, 0)
    assert book.release("l1", TWO) == []
    assert book.release("other") == []
    assert [lease.incarnation for lease in book.release("l1", ONE)] == [ONE]
    assert not book.renew(ONE, own, None, 1)
    assert book.release("l1") == []
    assert book.grant_learner(["a"], "l1", TWO, None, 1) == token("a", 2)


def test_actor_index_is_the_lowest_free_one(tmp_path: Path) -> None:
    """Indices are reused; a repeat gives the same, also after a restart."""
    book = open_book(tmp_path)
    assert [book.grant_actor(f"x{n}", inc, 0) for n, inc in enumerate((ONE, TWO, THREE))] == [0, 1, 2]
    assert book.grant_actor("x1", TWO, 1) == 1
    book.release("x0")
    assert book.renew(TWO, None, 1, 1)
    assert not book.renew(TWO, None, 0, 1)
    book = open_book(tmp_path, 2)
    assert book.grant_actor("x2", THREE, 2) == 2
    assert book.grant_actor("x9", "9" * 32, 2) == 0
    assert book.grant_actor("x8", "8" * 32, 2) == 3


def test_renew_of_nothing_or_of_what_was_never_granted_is_false(tmp_path: Path) -> None:
    """A heartbeat without a lease renews none."""
    book = open_book(tmp_path)
    book.grant_learner(["a"], "l1", ONE, None, 0)
    assert not book.renew(ONE, None, None, 0)
    assert not book.renew(ONE, token("a", 2), None, 0)
    assert not book.renew(TWO, token("a", 1), None, 0)
    assert not book.renew(ONE, token("z", 1), None, 0)
    assert not book.renew(ONE, token("a", 1), 0, 0)


def test_check_of_an_unknown_agent_or_number_is_refused(tmp_path: Path) -> None:
    """A token that this book never gave opens nothing."""
    book = open_book(tmp_path)
    with pytest.raises(Refused, match="no learner was ever given"):
        book.check(token("a", 1))
    book.grant_learner(["a"], "l1", ONE, None, 0)
    with pytest.raises(Refused, match="never granted"):
        book.check(token("a", 2))


def test_next_deadline_follows_the_earliest_lease(tmp_path: Path) -> None:
    """A timer set to it never misses a lapse."""
    book = open_book(tmp_path)
    assert book.next_deadline() is None
    own = book.grant_learner(["a"], "l1", ONE, None, 1)
    book.grant_actor("x", TWO, 2)
    assert book.next_deadline() == 1 + LEASE_S
    book.renew(ONE, own, None, 3)
    assert book.next_deadline() == 2 + LEASE_S
    assert {lease.role for lease in book.live(4)} == {"learner", "actor"}
    lease = book.learners()["a"]
    assert (book.is_live(lease, 4), book.is_live(lease, 100)) == (True, False)
    book.expire(100)
    assert book.next_deadline() is None
    assert book.learners()["a"].token == own


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_book_with_a_damaged_file_does_not_open(tmp_path: Path, share: float) -> None:
    """Without the numbers a grant could be given twice: better to stop."""
    open_book(tmp_path).grant_learner(["a"], "l1", ONE, None, 0)
    path = tmp_path / "leases.json"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BrokenInvariant, match=r"leases\.json is damaged"):
        open_book(tmp_path)


def test_grant_that_cannot_be_stored_is_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disk first: a failed write changes nothing in memory."""
    book = open_book(tmp_path)

    def full(path: Path, data: bytes) -> None:
        raise Refused("storage_failed", "full")

    monkeypatch.setattr("services.param_server.leases.write_atomic", full)
    with pytest.raises(Refused):
        book.grant_learner(["a"], "l1", ONE, None, 0)
    assert book.tokens(0) == {}
    assert book.next_deadline() is None
