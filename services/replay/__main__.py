"""`python -m services.replay`: one replay service alone."""

import argparse
import sys
from pathlib import Path

from services.replay.kernel_cache import lay_out_kernels
from shared.config import Config
from shared.entry import Runnable, main


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What only replay has."""
    parser.add_argument(
        "--number", type=int, default=0, help="which of the config's endpoints.replay this is (default: 0)"
    )


def build(config: Config, run_dir: Path, options: argparse.Namespace) -> Runnable:
    """The service, with kernels that are compiled already where possible."""
    lay_out_kernels()
    from services.replay.service import ReplayService  # noqa: PLC0415 - this is when kernels are loaded

    return ReplayService(config, run_dir, options.instance, options.number)


if __name__ == "__main__":
    sys.exit(
        main(
            "replay",
            "Keeps the agents' experience in memory-mapped files and serves prioritized batches. It waits "
            "for the parameter server and for an actor that registers the agents' specs.",
            build,
            add_arguments,
        )
    )
