"""Who is there, as heartbeats tell it."""

from services.param_server.roster import FORGET_AFTER_LEASES, MOST_FAILED, Roster
from shared.messages import Heartbeat, Token


def beat(instance: str = "learner-0", incarnation: str = "a" * 32, **changes: object) -> Heartbeat:
    fields = {
        "service": "learner",
        "instance": instance,
        "incarnation": incarnation,
        "pid": 7,
        "host": "here",
        "up_s": 10.0,
        "token": Token(agent="agent_0", number=1),
    }
    return Heartbeat(**(fields | changes))


def test_service_heard_of_is_listed_with_what_it_holds():
    """Its age and its silence go on with the clock."""
    roster = Roster(lease_s=1.0)
    roster.note(beat(), b"peer", now=100.0)
    (status,) = roster.statuses(now=102.0)
    assert (status.instance, status.holds, status.up_s, status.seen_s) == ("learner-0", "agent_0", 12.0, 2.0)
    found = roster.find("learner-0")
    assert found is not None
    assert found.peer == b"peer"


def test_new_incarnation_takes_the_place_of_the_old_one():
    """Control messages must not go to a process that died a moment ago."""
    roster = Roster(lease_s=1.0)
    roster.note(beat(incarnation="a" * 32), b"old", now=100.0)
    roster.note(beat(incarnation="b" * 32), b"new", now=100.5)
    found = roster.find("learner-0")
    assert found is not None
    assert found.peer == b"new"
    assert len(roster.statuses(now=101.0)) == 1


def test_goodbye_and_silence_end_an_entry():
    """One that said it is done is gone at once, a silent one after some lease times."""
    roster = Roster(lease_s=1.0)
    roster.note(beat("one"), b"1", now=0.0)
    roster.note(beat("two"), b"2", now=0.0)
    roster.note(beat("one", done=True), b"1", now=1.0)
    assert roster.instances == ["two"]
    roster.forget_silent(now=FORGET_AFTER_LEASES - 0.1)
    assert roster.instances == ["two"]
    roster.forget_silent(now=FORGET_AFTER_LEASES + 0.1)
    assert roster.instances == []


def test_removal_of_another_incarnation_changes_nothing():
    """A late release of a dead process must not remove its successor."""
    roster = Roster(lease_s=1.0)
    roster.note(beat(incarnation="b" * 32), b"new", now=0.0)
    roster.remove("learner-0", "a" * 32)
    assert roster.instances == ["learner-0"]
    roster.remove("learner-0", "b" * 32)
    assert roster.instances == []


def test_failures_of_an_instance_are_counted_and_name_the_process_that_ended():
    """What it held can be given back, if it is this process that was heard of last."""
    roster = Roster(lease_s=1.0)
    assert roster.note_failure("learner-0", 7, "ended with code 1", now=1.0) is None  # never heard of
    roster.note(beat(incarnation="b" * 32), b"new", now=2.0)
    assert roster.note_failure("learner-0", 6, "killed by signal 9", now=3.0) is None  # an earlier process
    assert roster.note_failure("learner-0", 7, "ended with code 3", now=4.0) == "b" * 32
    (failures,) = roster.failures(now=6.5).values()
    assert (failures.count, failures.reason, failures.seen_s) == (3, "ended with code 3", 2.5)


def test_failures_of_more_instances_than_anybody_has_are_forgotten_in_order():
    """Whoever can speak to the parameter server must not be able to fill its memory."""
    roster = Roster(lease_s=1.0)
    for number in range(MOST_FAILED + 1):
        roster.note_failure(f"learner-{number}", 1, "ended with code 1", now=0.0)
    assert len(roster.failures(now=1.0)) == MOST_FAILED
    assert "learner-0" not in roster.failures(now=1.0)
