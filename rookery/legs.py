"""A lockstep run in legs: it stops between two rounds now and then, is copied, and goes on.

So that nothing is lost when a process dies: everybody ends, the run goes back to its last copy, and plays
again what it had played since; the result is the same, bit for bit. A run that dies again and again at the
same place is given up with the reason.
"""

from __future__ import annotations

from typing import Any

from rookery.launcher import Ending, Launcher
from rookery.manifest import go_back, keep, write_manifest
from rookery.run_directory import RunDirectory
from rookery.view import View
from shared.config import Config
from shared.errors import RookeryError
from shared.schedule import Schedule

MOST_DEATHS = 3  # in a row, without a leg that was finished in between


class Legs:
    """Runs a lockstep run to its end."""

    def __init__(self, run: RunDirectory, config: Config, view: View) -> None:
        self.run, self.config, self.view = run, config, view

    def launch(self, resume: bool) -> Ending:
        deaths, restarts, wall_s = 0, dict[str, int](), 0.0
        while True:
            self.run.manifest_path.unlink(missing_ok=True)  # from here on it is not true any more
            ending = Launcher(self.run, self.config, self.view).launch(resume)
            wall_s += ending.wall_s
            if ending.died:
                deaths += 1
                restarts[ending.died] = restarts.get(ending.died, 0) + 1
                self._after_death(ending.died, deaths)
                resume = go_back(self.run)
                continue
            if ending.ended_at_once:
                return ending
            deaths = 0
            manifest = write_manifest(self.run, self.config)
            if not ending.leg_over or self._has_all_rounds(manifest):
                return Ending(ending.status, ending.ledger, ending.interrupted, wall_s, restarts)
            keep(self.run)
            resume = True

    def _has_all_rounds(self, manifest: dict[str, Any]) -> bool:
        """A leg may end with the run's last round."""
        rounds = Schedule.of(self.config).rounds
        return rounds is not None and all(part["rounds"] >= rounds for part in manifest["agents"].values())

    def _after_death(self, instance: str, deaths: int) -> None:
        log = self.run.logs / f"{instance}.log"
        if deaths >= MOST_DEATHS:
            raise RookeryError(f"{instance} died {deaths} times in a row at the same place; see {log}")
        self.view.say(f"{instance} died (see {log}); lockstep goes back to its last manifest and plays again")
