"""The errors of Rookery, each saying what its receiver can do about it.

`BadMessage` is for bytes from outside: count, log, drop (or answer). `Refused` is an answer that a peer
gave on purpose: do what its reason says. `PeerSilent` means try again later. `BrokenInvariant` means
that continuing would damage state, `Stuck` that there is no continuing: end the process and let the
supervisor start it again.
"""


class RookeryError(Exception):
    """Anything that Rookery raises on purpose."""


class ConfigError(RookeryError):
    """The configuration cannot work; the message names the key, the value and what is allowed."""


class BadMessage(RookeryError):
    """Bytes that are not a message of ours. The receiver counts it, logs it and goes on."""


class SpecMismatch(BadMessage):
    """A message whose arrays do not have the declared names, types or shapes."""


class Refused(RookeryError):
    """A peer understood the request and said no; `code` is for programs, the text for people."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class StaleToken(Refused):
    """A newer learner owns this agent. Stop using the lease and ask for a new one."""

    def __init__(self, reason: str) -> None:
        super().__init__("stale_token", reason)


class NoTray(RookeryError):
    """Memory that a learner lent cannot be used from here. The batch travels through the socket."""


class PeerSilent(RookeryError):
    """A peer did not answer before the deadline. Try again later, or check that it runs."""


class BrokenInvariant(RookeryError):
    """State on disk or in memory contradicts itself. The process must end; nothing may be written."""


class TrainingFailed(RookeryError):
    """What a learner holds in memory is spoilt. It must end, and start again from its checkpoint."""


class Stuck(RookeryError):
    """Something did not end before its deadline. The process must end, and starts again from what it kept."""


class WorldError(RookeryError):
    """A world does not do what its specs say, or cannot be built from the config."""
