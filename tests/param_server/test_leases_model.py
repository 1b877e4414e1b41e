from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.param_server.leases import LeaseBook
from shared.errors import StaleToken
from shared.messages import Token

LEASE_S = 10.0
AGENTS = ("a", "b")


def token(agent: str, number: int) -> Token:
    return Token(agent=agent, number=number)


class LeaseMachine(RuleBasedStateMachine):
    """The book beside a plain model: who may hold what until when, whatever happens in between."""

    incarnations = st.integers(0, 4).map(lambda n: f"{n:032x}")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.now = 100.0
        self.book = self.open()
        self.holders: dict[str, tuple[str, int, float]] = {}  # agent: incarnation, number, live until
        self.indices: dict[int, tuple[str, float]] = {}
        self.numbers: dict[str, int] = {}
        self.lapse_seen: set[str | int] = set()

    def open(self) -> LeaseBook:
        return LeaseBook(self.directory / "leases.json", LEASE_S, lambda: self.now)

    @rule(incarnation=incarnations, wanted=st.sampled_from([None, "a", "b"]))
    def grant_learner(self, incarnation: str, wanted: str | None) -> None:
        granted = self.book.grant_learner(AGENTS, f"i{incarnation}", incarnation, wanted, self.now)
        if granted is None:
            candidates = [wanted] if wanted else AGENTS
            assert all(self.holders[agent][2] > self.now for agent in candidates)
            return
        holder, number, until = self.holders.get(granted.agent, ("", 0, 0.0))
        if holder == incarnation:
            assert granted.number == number
        else:
            assert until <= self.now
            assert granted.number == self.numbers.get(granted.agent, 0) + 1
        self.numbers[granted.agent] = granted.number
        self.holders[granted.agent] = (incarnation, granted.number, self.now + LEASE_S)
        self.lapse_seen.discard(granted.agent)

    @rule(incarnation=incarnations)
    def grant_actor(self, incarnation: str) -> None:
        index = self.book.grant_actor(f"i{incarnation}", incarnation, self.now)
        holder, until = self.indices.get(index, ("", 0.0))
        if holder != incarnation:
            assert until <= self.now
            assert all(i in self.indices and self.indices[i][1] > self.now for i in range(index))
        self.indices[index] = (incarnation, self.now + LEASE_S)
        self.lapse_seen.discard(index)

    @rule(incarnation=incarnations, agent=st.sampled_from(AGENTS), behind=st.integers(0, 1))
    def renew_learner(self, incarnation: str, agent: str, behind: int) -> None:
        number = max(1, self.numbers.get(agent, 1) - behind)
        renewed = self.book.renew(incarnation, token(agent, number), None, self.now)
        assert renewed == (self.holders.get(agent, ("", 0, 0.0))[:2] == (incarnation, number))
        if renewed:
            self.holders[agent] = (incarnation, number, self.now + LEASE_S)
            self.lapse_seen.discard(agent)

    @rule(incarnation=incarnations, index=st.integers(0, 3))
    def renew_actor(self, incarnation: str, index: int) -> None:
        renewed = self.book.renew(incarnation, None, index, self.now)
        assert renewed == (self.indices.get(index, ("", 0.0))[0] == incarnation)
        if renewed:
            self.indices[index] = (incarnation, self.now + LEASE_S)
            self.lapse_seen.discard(index)

    @rule(incarnation=incarnations, exactly=st.booleans())
    def release(self, incarnation: str, exactly: bool) -> None:
        self.book.release(f"i{incarnation}", incarnation if exactly else None)
        self.holders = {agent: held for agent, held in self.holders.items() if held[0] != incarnation}
        self.indices = {index: held for index, held in self.indices.items() if held[0] != incarnation}

    @rule(seconds=st.sampled_from([0.5, 4.0, 10.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        lapsed = {
            lease.index if lease.role == "actor" else lease.name for lease in self.book.expire(self.now)
        }
        expected: set[str | int] = {agent for agent, held in self.holders.items() if held[2] <= self.now}
        expected |= {index for index, held in self.indices.items() if held[1] <= self.now}
        assert lapsed == expected - self.lapse_seen
        self.lapse_seen |= lapsed

    @rule(clock=st.sampled_from([0.0, 50.0, 1000.0]))
    def restart(self, clock: float) -> None:
        """The machine may have been started anew: the clock jumps, in either direction."""
        self.now = clock
        self.book = self.open()
        for agent, (incarnation, number, _) in self.holders.items():
            until = 0.0 if agent in self.lapse_seen else clock + LEASE_S
            self.holders[agent] = (incarnation, number, until)
        for index, (incarnation, _) in self.indices.items():
            self.indices[index] = (incarnation, 0.0 if index in self.lapse_seen else clock + LEASE_S)

    @invariant()
    def tokens_are_those_of_the_model(self) -> None:
        live = {
            agent: self.holders[agent][1]
            if agent in self.holders and self.holders[agent][2] > self.now
            else 0
            for agent in self.numbers
        }
        assert self.book.tokens(self.now) == live

    @invariant()
    def only_the_newest_number_is_accepted(self) -> None:
        for agent, number in self.numbers.items():
            self.book.check(token(agent, number))
            if number > 1:
                with pytest.raises(StaleToken):
                    self.book.check(token(agent, number - 1))

    def teardown(self) -> None:
        shutil.rmtree(self.directory)


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
