"""Every message that travels between services: what a header may say. Start reading here.

A message is one header (a model below, as JSON) and, if it has arrays, one frame with their bytes;
`shared/codec.py` turns the two into frames and back. Names are nouns. Requests carry an id and a deadline in
seconds from arrival; replies repeat the id. Every message names its run, and a service refuses those of
another run.
The life of one step goes: Segment, StreamMarks, SampleRequest, Batch, PriorityUpdate, Publish, Weights.

Next: services/actor/rollout.py
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from shared.errors import BadMessage
from shared.specs import AGENT_ID_PATTERN, AgentSpec

AgentId = Annotated[str, Field(pattern=AGENT_ID_PATTERN)]
Incarnation = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # unique for each start of a process
Count = Annotated[int, Field(ge=0, lt=2**63)]
# What others add up: bounded, so that no sum of what arrives can leave the range of a Count.
Tally = Annotated[int, Field(ge=0, lt=2**44)]
Duration = Annotated[float, Field(ge=0.0, le=86_400.0)]
Text = Annotated[str, Field(max_length=2_000)]
ServiceName = Literal["replay", "param_server", "learner", "actor", "launcher", "client"]
RunState = Literal["running", "paused", "draining", "finished"]


class Part(BaseModel):
    """The rules that every part of a header keeps: no unknown fields, no change after creation."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


class Token(Part):
    """The right to act for an agent: numbers rise with each grant, and lower ones are refused everywhere."""

    agent: AgentId
    number: Annotated[int, Field(ge=1, lt=2**63)]


class Message(Part):
    """What every header has."""

    protocol: Literal[1] = 1
    run: Annotated[str, Field(max_length=64)] = ""
    arrays: Annotated[str, Field(max_length=200_000)] = ""  # what the data frame holds: shared/layout.py


M = TypeVar("M", bound=Message)


def expect(message: Message, kind: type[M]) -> M:
    """The message as the kind that must come here, or BadMessage: what arrives is never taken on trust."""
    if not isinstance(message, kind):
        raise BadMessage(f"{type(message).__name__} where {kind.__name__} was expected")
    return message


class Request(Message):
    """A question with an id of the asker's choosing; past its deadline it is answered with the reason."""

    request: Count = 0
    deadline_s: Duration = 10.0


class Reply(Message):
    """An answer to the request with this id (0: nobody asked, the sender volunteers it)."""

    request: Count = 0


class ErrorReply(Reply):
    """A refusal: `code` for programs, `reason` for people."""

    kind: Literal["error_reply"] = "error_reply"
    code: Annotated[str, Field(max_length=64)]
    reason: Text


class Done(Reply):
    """The request was carried out and there is nothing more to say."""

    kind: Literal["done"] = "done"


# --- experience: actor -> replay --------------------------------------------------------------------------


class Segment(Message):
    """Consecutive steps of one agent in one environment slot, with the context rows around them.

    Of `rows` observations the first `before` are context for stacks, the next `owned` belong to the steps
    that can be drawn and are counted, the rest serve n-step returns. Step columns have rows - 1 rows: the
    last observation has no step. All rows are of one episode. It travels in a frame of its own kind
    (`shared/segment_frame.py`), for which this is the law.
    """

    kind: Literal["segment"] = "segment"
    incarnation: Incarnation
    agent: AgentId
    sequence: Annotated[int, Field(ge=1, lt=2**63)]
    produced_steps: Tally  # by this stream so far, counted by the actor as it plays
    actor_index: Count
    slot: Count
    epoch: Count
    before: Annotated[int, Field(ge=0, lt=2**16)]
    owned: Annotated[int, Field(ge=1, lt=2**16)]
    rows: Annotated[int, Field(ge=2, lt=2**16)]
    layout: Annotated[int, Field(ge=0, lt=2**64)] = 0  # xxh3 of the line that says what the arrays are
    checksum: Annotated[int, Field(ge=0, lt=2**64)]  # xxh3 over the arrays as they travel
    round: Count = 0  # in lockstep: the round that these steps are of
    closes_round: bool = False  # in lockstep: the actor has no more of this agent in this round


class StreamReport(Request):
    """An actor's own count of what it produced, and a question: how far have you stored my streams?"""

    kind: Literal["stream_report"] = "stream_report"
    incarnation: Incarnation
    produced_steps: dict[AgentId, Tally]
    final: bool = False  # the actor ended on purpose: what is not stored now is lost


class Mark(Part):
    """How far a stream is: `stored` is committed, `acknowledged` trails it while the limiter holds back."""

    stored: Count
    acknowledged: Count
    held: Count = 0  # in lockstep: received after `stored` and kept until their round's turn; not missing
    gap: bool = False  # something later than stored + 1 arrived: go back and send again


class StreamMarks(Reply):
    """Acknowledgement of one actor's streams: cumulative, sent after the commit."""

    kind: Literal["stream_marks"] = "stream_marks"
    incarnation: Incarnation
    marks: dict[AgentId, Mark]
    waiting_for: Text = ""  # why acknowledgements are held back, for people


# --- batches: learner <-> replay --------------------------------------------------------------------------


class Tray(Part):
    """Memory of a learner's own where replay may put one batch: shared/links/trays.py."""

    pid: Annotated[int, Field(ge=0, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]
    name: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # never used twice


class SampleRequest(Request):
    """Draw number `draw` of this agent, held by replay until it can be served."""

    kind: Literal["sample_request"] = "sample_request"
    token: Token
    draw: Count
    batch_size: Annotated[int, Field(ge=1, le=65_536)]
    beta: Annotated[float, Field(ge=0.0, le=1.0)]
    tray: Tray | None = None  # in the first sending alone, never in its repeats


class Batch(Reply):
    """The rows of one draw; which arrays it has is said in docs/protocol.md."""

    kind: Literal["batch"] = "batch"
    token: Token
    draw: Count
    on_tray: Annotated[str, Field(max_length=200_000)] = ""  # `arrays` of what lies on the request's tray
    no_tray: Text = ""  # why that tray could not be used


class PriorityUpdate(Message):
    """New priorities for the rows of one draw: arrays index, generation, priority; none if it was skipped.

    Not answered.
    """

    kind: Literal["priority_update"] = "priority_update"
    token: Token
    draw: Count


class PhaseRequest(Request):
    """In lockstep: how often may I draw once this round is stored? Held by replay until it is."""

    kind: Literal["phase_request"] = "phase_request"
    token: Token
    round: Count


class PhaseGrant(Reply):
    """All draws below `draws` are due: the round is stored, the next one waits until they are trained on."""

    kind: Literal["phase_grant"] = "phase_grant"
    round: Count
    draws: Count


class ReplayStatsRequest(Request):
    """How full, how fast, who is blocked."""

    kind: Literal["replay_stats_request"] = "replay_stats_request"


class LimiterStats(Part):
    """Who waits at the limiter of one agent, and for what; and its settings as they are now."""

    blocked: Literal["", "samples", "inserts"]
    reason: Text
    since_s: float
    samples_per_insert: float
    min_steps: Count
    tolerance_samples: float
    ahead_samples: float  # paid for by inserts and not yet drawn


class BufferStats(Part):
    """One agent's buffer."""

    drawable_steps: Count
    capacity_steps: Count
    inserted_steps: Count
    sampled_steps: Count
    held_requests: Count
    stale_priorities: Count
    max_priority: float
    limiter: LimiterStats


class ReplayStats(Reply):
    """All buffers of one replay service, what it had to refuse, by reason, and its newest snapshot."""

    kind: Literal["replay_stats"] = "replay_stats"
    buffers: dict[AgentId, BufferStats]
    counters: dict[str, int]
    newest_snapshot: Count  # 0: none


class SnapshotOrder(Request):
    """Take a snapshot of all buffers as they are now, under this number. Held until it is on the disk.

    The asker chooses the number, above all that exist (`ReplayStats.newest_snapshot`): given to every replay
    service, it makes one snapshot of the run. A number that was taken already is answered again.
    """

    kind: Literal["snapshot_order"] = "snapshot_order"
    number: Annotated[int, Field(ge=1, lt=2**31)]


class SnapshotTaken(Reply):
    """The snapshot is on the disk, proven by its checksums."""

    kind: Literal["snapshot_taken"] = "snapshot_taken"
    number: Count
    steps: dict[AgentId, Count]  # that can be drawn from it
    size_bytes: Count


class LedgerRequest(Request):
    """Count every step. `closing` says that no actor lives any more: what is missing is abandoned."""

    kind: Literal["ledger_request"] = "ledger_request"
    closing: bool = False


class Ledger(Reply):
    """Steps by what became of them. `produced` is the actors' count, `stored` replay's own."""

    kind: Literal["ledger"] = "ledger"
    produced: Count
    stored: Count
    in_flight: Count
    abandoned: Count
    duplicates_dropped: Count
    stored_twice: Count
    lost: int
    produced_by: dict[Incarnation, Count] = {}  # what each incarnation was last heard to have produced here


# --- weights, leases, run state: everyone <-> parameter server ---------------------------------------------


class Hello(Request):
    """The first message of a service: which run is this?"""

    kind: Literal["hello"] = "hello"
    service: ServiceName
    instance: Text
    incarnation: Incarnation


class Welcome(Reply):
    """The run that the parameter server keeps."""

    kind: Literal["welcome"] = "welcome"
    run_id: Text
    state: RunState
    lease_s: Duration


class SpecRegistration(Request):
    """What an actor found when it built the world."""

    kind: Literal["spec_registration"] = "spec_registration"
    specs: dict[AgentId, AgentSpec]


class SpecRequest(Request):
    """Held until an actor has registered the specs, or the deadline passes."""

    kind: Literal["spec_request"] = "spec_request"


class Specs(Reply):
    """Every agent's spec."""

    kind: Literal["specs"] = "specs"
    specs: dict[AgentId, AgentSpec]


class LeaseRequest(Request):
    """Asks for an agent to learn for, or for an index to act with. Repeating it changes nothing."""

    kind: Literal["lease_request"] = "lease_request"
    role: Literal["learner", "actor"]
    instance: Text
    incarnation: Incarnation
    agent: AgentId | None = None  # a learner may ask for one in particular


class LeaseGrant(Reply):
    """A learner's token, or an actor's index; it lasts `lease_s` past each heartbeat."""

    kind: Literal["lease_grant"] = "lease_grant"
    token: Token | None = None
    index: Count | None = None
    lease_s: Duration


class RoundRequest(Request):
    """In lockstep: may I play this round (None: the first one)? Held by the parameter server until I may."""

    kind: Literal["round_request"] = "round_request"
    index: Count
    round: Count | None = None


class RoundGrant(Reply):
    """Play this round, each agent with exactly this version of its weights."""

    kind: Literal["round_grant"] = "round_grant"
    round: Count
    versions: dict[AgentId, Count]


class PermitRequest(Request):
    """A learner asks to be one of those that train now (parallel.num_workers). Held until there is room."""

    kind: Literal["permit_request"] = "permit_request"
    token: Token


class PermitReturn(Message):
    """The permit is free for the next one. Not answered; a lost one comes back with the lease."""

    kind: Literal["permit_return"] = "permit_return"
    token: Token


class EpochSummary(Part):
    """What an actor played since its last confirmed report; `number` rises by one with each."""

    number: Annotated[int, Field(ge=1, lt=2**44)]
    epochs: Tally
    env_steps: Tally
    agent_steps: Tally  # of agents that learn: what goes to replay
    return_sums: dict[AgentId, float]


class Heartbeat(Request):
    """I live. Renews the sender's lease and carries its figures."""

    kind: Literal["heartbeat"] = "heartbeat"
    service: ServiceName
    instance: Text
    incarnation: Incarnation
    pid: Count
    host: Text
    up_s: Annotated[float, Field(ge=0)]
    token: Token | None = None
    index: Count | None = None
    ready: bool = True
    done: bool = False  # drained: nothing more will come from this process
    waiting_for: Text = ""
    metrics: dict[str, float] = {}
    epochs: EpochSummary | None = None


class HeartbeatReply(Reply):
    """The run as the parameter server sees it, and how far the sender's epoch summaries were taken."""

    kind: Literal["heartbeat_reply"] = "heartbeat_reply"
    state: RunState
    lease_held: bool
    epoch_summary: Count
    epochs: Count
    agent_steps: Count


class ProducedRequest(Request):
    """How many steps has each incarnation said it played? For the ledger when some were killed."""

    kind: Literal["produced_request"] = "produced_request"


class Produced(Reply):
    """Steps by incarnation, summed over agents, as the heartbeats said."""

    kind: Literal["produced"] = "produced"
    steps: dict[Incarnation, Count]


class Publish(Request):
    """An agent's whole state dict. `publish_id` makes a repeat harmless."""

    kind: Literal["publish"] = "publish"
    token: Token
    publish_id: Text
    updates: Count


class Published(Reply):
    """The version that these weights became."""

    kind: Literal["published"] = "published"
    version: Count


class SnapshotRequest(Request):
    """The newest (or the given) version of an agent's weights, in full."""

    kind: Literal["snapshot_request"] = "snapshot_request"
    agent: AgentId
    version: Count | None = None


class Weights(Reply):
    """A version of weights: in full, or what differs from the last full version `base`."""

    kind: Literal["weights"] = "weights"
    agent: AgentId
    version: Count
    updates: Count
    base: Count | None = None
    checksum: Annotated[int, Field(ge=0, lt=2**32)]  # of the resulting state


class CheckpointChunk(Request):
    """A piece of a learner's checkpoint on its way to the parameter server: one uint8 array."""

    kind: Literal["checkpoint_chunk"] = "checkpoint_chunk"
    token: Token
    checkpoint_id: Text
    offset: Count
    total_bytes: Count
    checksum: Annotated[int, Field(ge=0, lt=2**32)]  # crc32 of the whole


class CheckpointRequest(Request):
    """A piece of the newest whole checkpoint of the token's agent."""

    kind: Literal["checkpoint_request"] = "checkpoint_request"
    token: Token
    offset: Count = 0


class CheckpointPiece(Reply):
    """That piece, as one uint8 array; total_bytes 0 means that there is none."""

    kind: Literal["checkpoint_piece"] = "checkpoint_piece"
    checkpoint_id: Text
    offset: Count
    total_bytes: Count
    checksum: Count


class Release(Request):
    """Gives leases back: by the holder itself, or by the launcher that saw the process die."""

    kind: Literal["release"] = "release"
    instance: Text
    incarnation: Incarnation | None = None


class FailureReport(Request):
    """A process ended that was to go on: told by whoever saw it and starts it again. Its leases are free."""

    kind: Literal["failure_report"] = "failure_report"
    instance: Text
    pid: Count
    reason: Text


class ControlRequest(Request):
    """What a person asks of the run (target "") or, through the parameter server, of one instance."""

    kind: Literal["control_request"] = "control_request"
    action: Literal["status", "pause", "resume", "drain", "stop", "set"]
    target: Text = ""
    values: dict[str, float] = {}


class ControlReply(Reply):
    """What the service says of itself."""

    kind: Literal["control_reply"] = "control_reply"
    service: ServiceName
    instance: Text
    state: RunState
    ready: bool
    waiting_for: Text = ""
    metrics: dict[str, float] = {}


class StatusRequest(Request):
    """The whole run at a glance."""

    kind: Literal["status_request"] = "status_request"


class ServiceStatus(Part):
    """One service as its heartbeats show it."""

    service: ServiceName
    instance: Text
    incarnation: Incarnation
    pid: Count
    host: Text
    up_s: float
    seen_s: float  # seconds since its last heartbeat
    ready: bool
    done: bool
    holds: Text  # its agent, or its actor index
    waiting_for: Text
    metrics: dict[str, float]


class Failures(Part):
    """How often an instance ended that was to go on, and how it last did."""

    count: Count
    reason: Text
    seen_s: float  # seconds since the last time


class AgentStatus(Part):
    """One agent as the parameter server sees it."""

    version: Count
    updates: Count
    token: Count  # 0: nobody learns for it
    learner: Text
    recent_return: float | None  # mean over the newest reports


class RunStatus(Reply):
    """The whole run: the answer to StatusRequest, and broadcast every second."""

    kind: Literal["run_status"] = "run_status"
    state: RunState
    run_id: Text
    elapsed_s: float
    epochs: Count
    env_steps: Count
    agent_steps: Count
    services: tuple[ServiceStatus, ...]
    agents: dict[AgentId, AgentStatus]
    counters: dict[str, int]
    failures: dict[Text, Failures] = {}  # by instance


class LearnerLease(Part):
    """The newest lease of an agent; not `live`: nobody learns for it now."""

    number: Count
    incarnation: str
    live: bool


class RunNotice(Message):
    """Broadcast on every change and every second: the state, the counters, who learns for whom."""

    kind: Literal["run_notice"] = "run_notice"
    state: RunState
    epochs: Count
    agent_steps: Count
    learners: dict[AgentId, LearnerLease]
    versions: dict[AgentId, Count]  # the newest version of each agent: a subscriber that has less missed it


AnyMessage = Annotated[
    ErrorReply | Done
    | Segment | StreamReport | StreamMarks
    | SampleRequest | Batch | PriorityUpdate | PhaseRequest | PhaseGrant
    | ReplayStatsRequest | ReplayStats | SnapshotOrder | SnapshotTaken | LedgerRequest | Ledger
    | Hello | Welcome | SpecRegistration | SpecRequest | Specs
    | RoundRequest | RoundGrant | PermitRequest | PermitReturn
    | LeaseRequest | LeaseGrant | Heartbeat | HeartbeatReply | Release | FailureReport
    | ProducedRequest | Produced
    | Publish | Published | SnapshotRequest | Weights
    | CheckpointChunk | CheckpointRequest | CheckpointPiece
    | ControlRequest | ControlReply | StatusRequest | RunStatus | RunNotice,
    Field(discriminator="kind"),
]  # fmt: skip

ANY_MESSAGE: TypeAdapter[AnyMessage] = TypeAdapter(AnyMessage)
