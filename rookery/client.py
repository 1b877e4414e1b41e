"""Short questions to a running run, for the command line."""

from __future__ import annotations

import uuid
from types import TracebackType

from shared.config import Config
from shared.errors import PeerSilent
from shared.links.network import Network
from shared.links.requests import RequestSender
from shared.loop import Loop
from shared.messages import (
    ControlReply,
    ControlRequest,
    Hello,
    Ledger,
    LedgerRequest,
    Produced,
    ProducedRequest,
    ReplayStats,
    ReplayStatsRequest,
    RunStatus,
    ServiceStatus,
    SnapshotOrder,
    SnapshotTaken,
    StatusRequest,
    Welcome,
    expect,
)
from shared.placement import replay_of


class RunClient:
    """A connection to a run's parameter server and replay services, for a few questions."""

    def __init__(self, config: Config, timeout_s: float = 3.0) -> None:
        self.config, self.timeout_s = config, timeout_s
        self.loop = Loop()
        self.network = Network.of(config, self.loop)
        self.params = self._open(config.endpoints.params)

    def __enter__(self) -> RunClient:
        if self.config.parallel.mode == "sequential":
            self.close()
            raise PeerSilent(
                "the run is sequential: one process without sockets, which nobody can ask; Ctrl-C in its "
                "terminal ends it after the present round"
            )
        try:
            hello = Hello(service="client", instance="command line", incarnation=uuid.uuid4().hex)
            welcome = self.params.call(hello, timeout_s=self.timeout_s).message
        except PeerSilent:
            self.close()
            raise PeerSilent(
                f"nothing answers at {self.config.endpoints.params}: the run is not running"
            ) from None
        self.params.run = expect(welcome, Welcome).run_id
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.network.close()
        self.loop.close()

    def status(self) -> RunStatus:
        return expect(self.params.call(StatusRequest(), timeout_s=self.timeout_s).message, RunStatus)

    def control(self, action: str, target: str = "", values: dict[str, float] | None = None) -> ControlReply:
        request = ControlRequest(action=action, target=target, values=values or {})
        return expect(self.params.call(request, timeout_s=self.timeout_s).message, ControlReply)

    def set_on_replays(self, values: dict[str, float]) -> None:
        """Changes settings of every replay service that lives."""
        lease_s = self.config.param_server.lease_s
        replays = [each for each in self.status().services if _is_replay(each) and each.seen_s <= lease_s]
        if not replays:
            raise PeerSilent("no replay service has been heard of; nothing was changed")
        for replay in replays:
            try:
                self.control("set", replay.instance, values)
            except PeerSilent:
                raise PeerSilent(f"{replay.instance} does not answer; try again when it runs") from None

    def newest_snapshot(self) -> int:
        """The highest number that any replay service has; 0: there is none."""
        stats = self.replay_stats()
        if None in stats:
            silent = f"replay-{stats.index(None)} does not answer"
            raise PeerSilent(f"{silent}: there can be no snapshot of the whole run")
        return max((each.newest_snapshot for each in stats if each is not None), default=0)

    def take_snapshot(self, number: int, timeout_s: float) -> list[SnapshotTaken]:
        """Of every replay service that keeps agents, one after the other, under one number."""
        agents = self.config.learning_agents
        parts = []
        for place in sorted({replay_of(self.config, agents, agent) for agent in agents}):
            link = self._open(self.config.endpoints.replay[place].requests)
            link.run = self.params.run
            answer = link.call(SnapshotOrder(number=number), timeout_s=timeout_s).message
            assert isinstance(answer, SnapshotTaken)
            parts.append(answer)
        return parts

    def replay_stats(self) -> list[ReplayStats | None]:
        """Of each replay service; None: it does not answer."""
        return [self._stats_of(endpoints.requests) for endpoints in self.config.endpoints.replay]

    def _stats_of(self, endpoint: str) -> ReplayStats | None:
        link = self._open(endpoint)
        link.run = self.params.run
        try:
            answer = link.call(ReplayStatsRequest(), timeout_s=self.timeout_s).message
        except PeerSilent:
            return None
        return expect(answer, ReplayStats)

    def ledgers(self) -> list[Ledger]:
        """Of each replay service; what of one that does not answer is unknown, so that is an error."""
        answers = []
        for endpoints in self.config.endpoints.replay:
            link = self._open(endpoints.requests)
            link.run = self.params.run
            answers.append(expect(link.call(LedgerRequest(), timeout_s=self.timeout_s).message, Ledger))
        return answers

    def produced(self) -> dict[str, int]:
        """What each actor told the parameter server, by incarnation."""
        return expect(self.params.call(ProducedRequest(), timeout_s=self.timeout_s).message, Produced).steps

    def living_actors(self) -> set[str]:
        """Their incarnations."""
        lease_s = self.config.param_server.lease_s
        return {
            each.incarnation
            for each in self.status().services
            if each.service == "actor" and each.seen_s <= lease_s and not each.done
        }

    def _open(self, endpoint: str) -> RequestSender:
        return RequestSender(self.network, endpoint, identity=uuid.uuid4().hex)


def _is_replay(service: ServiceStatus) -> bool:
    return service.service == "replay"
