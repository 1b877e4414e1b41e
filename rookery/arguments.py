"""Arguments that several commands have."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

RUN_VARIABLE = "ROOKERY_RUN__DIR"


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN; where the environment names one, as in a container, it need not be given."""
    default = os.environ.get(RUN_VARIABLE, "")
    if default:
        parser.add_argument(
            "run", type=Path, nargs="?", default=Path(default), metavar="RUN", help="default: %(default)s"
        )
    else:
        parser.add_argument("run", type=Path, metavar="RUN", help=f"its directory (or ${RUN_VARIABLE})")
