"""`python -m services.replay`: one replay service alone."""

import argparse
import sys

from services.replay.service import ReplayService
from shared.entry import main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What only replay has."""
    parser.add_argument(
        "--number", type=int, default=0, help="which of the config's endpoints.replay this is (default: 0)"
    )


if __name__ == "__main__":
    sys.exit(
        main(
            "replay",
            "Keeps the agents' experience in memory-mapped files and serves prioritized batches. It waits "
            "for the parameter server and for an actor that registers the agents' specs.",
            lambda config, run_dir, options: ReplayService(config, run_dir, options.instance, options.number),
            add_arguments,
        )
    )
