"""`python -m services.actor`: one actor alone."""

import argparse
import sys
from pathlib import Path

from services.actor.round_service import RoundActorService
from services.actor.service import ActorService
from shared.config import Config
from shared.entry import main


def build(config: Config, run_dir: Path, options: argparse.Namespace) -> ActorService:
    """The actor that the run's mode wants."""
    service = RoundActorService if config.parallel.mode == "lockstep" else ActorService
    return service(config, run_dir, options.instance)


if __name__ == "__main__":
    sys.exit(
        main(
            "actor",
            "Plays the world with the newest weights and sends experience to replay. It takes an index from "
            "the parameter server, so any number of actors can be started without setting anything by hand.",
            build,
        )
    )
