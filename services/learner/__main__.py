"""`python -m services.learner`: one learner alone."""

import argparse
import sys

from services.learner.service import LearnerService
from shared.entry import main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What only a learner has."""
    parser.add_argument("--agent", help="learn for this agent (default: any that has no learner)")


if __name__ == "__main__":
    sys.exit(
        main(
            "learner",
            "Trains one agent: takes a lease from the parameter server, batches from replay, and publishes "
            "weights. It waits for both.",
            lambda config, run_dir, options: LearnerService(config, run_dir, options.instance, options.agent),
            add_arguments,
        )
    )
