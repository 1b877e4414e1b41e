"""`python -m services.actor`: one actor alone."""

import sys

from services.actor.service import ActorService
from shared.entry import main

if __name__ == "__main__":
    sys.exit(
        main(
            "actor",
            "Plays the world with the newest weights and sends experience to replay. It takes an index from "
            "the parameter server, so any number of actors can be started without setting anything by hand.",
            lambda config, run_dir, options: ActorService(config, run_dir, options.instance),
        )
    )
