"""A lockstep run in legs: it stops between two rounds now and then, is copied, and goes on.

So that nothing is lost when a process dies: everybody ends, the run goes back to its last copy, and plays
again what it had played since; the result is the same, bit for bit. A run that dies again and again at the
same place is given up with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rookery.interrupts import Interrupts
from rookery.launcher import Ending, Launcher, NotBegun, ServiceDied
from rookery.manifest import go_back, keep, write_manifest
from rookery.run_directory import RunDirectory
from rookery.view import View
from shared.config import Config
from shared.errors import Refused, RookeryError
from shared.schedule import Schedule

MOST_DEATHS = 3  # in a row, without a leg that was finished in between


class Legs:
    """Runs a lockstep run to its end."""

    def __init__(self, run: RunDirectory, config: Config, view: View) -> None:
        self.run, self.config, self.view = run, config, view
        self._deaths = 0  # in a row
        self._restarts: dict[str, int] = {}
        self._wall_s = 0.0

    def launch(self, resume: bool) -> Ending:
        """Leg after leg. The launcher takes Ctrl-C while there is one; between two of them it is noted."""
        before: Ending | None = None
        with Interrupts(lambda: self.view.say("ending after this copy of the run")) as interrupts:
            while True:
                self.run.manifest_path.unlink(missing_ok=True)  # from here on it is not true any more
                try:
                    ending = self._leg(resume, before)
                except ServiceDied as death:
                    self._after_death(death)
                    resume = go_back(self.run)
                    before = before if resume else None  # the copy is of where that leg ended
                    continue
                self._wall_s += ending.wall_s
                whole = replace(ending, wall_s=self._wall_s, restarts=self._restarts)
                if ending.ended_at_once:
                    return whole
                manifest = write_manifest(self.run, self.config)
                if not ending.leg_over or self._has_all_rounds(manifest):
                    return whole
                keep(self.run)
                if interrupts.count:
                    return replace(whole, interrupted=True)
                self._deaths, resume, before = 0, True, ending

    def _leg(self, resume: bool, before: Ending | None) -> Ending:
        try:
            return Launcher(self.run, self.config, self.view).launch(resume)
        except Refused as error:
            if before is None or error.code != "limit_reached":
                raise
            # The last leg ended just when the run's time was over: there is nothing left to play.
            return replace(before, leg_over=False, wall_s=0.0)
        except NotBegun:
            if before is None:
                raise
            return replace(before, leg_over=False, wall_s=0.0, interrupted=True)

    def _has_all_rounds(self, manifest: dict[str, Any]) -> bool:
        """A leg may end with the run's last round."""
        rounds = Schedule.of(self.config).rounds
        return rounds is not None and all(part["rounds"] >= rounds for part in manifest["agents"].values())

    def _after_death(self, death: ServiceDied) -> None:
        self._wall_s += death.wall_s
        self._deaths += 1
        self._restarts[death.instance] = self._restarts.get(death.instance, 0) + 1
        log = self.run.logs / f"{death.instance}.log"
        if death.interrupted:
            raise RookeryError(
                f"{death} while the run was ending (see {log}); --resume goes back to its last manifest"
            )
        if self._deaths >= MOST_DEATHS:
            raise RookeryError(f"{death}, {self._deaths} times in a row at the same place; see {log}")
        self.view.say(f"{death} (see {log}); lockstep goes back to its last manifest and plays again")
