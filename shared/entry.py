"""How a service process begins: its command line, its log, and the promise not to outlive its launcher."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from shared.config import Config, load_config
from shared.errors import ConfigError, RookeryError
from shared.logs import get_logger, set_up_logging
from shared.scheduling import interrupt_nobody

log = get_logger()

LAST_GRACE_S = 5.0  # an orphan that has not ended by then is ended


class Runnable(Protocol):
    """Anything with a life of its own."""

    def run(self) -> None: ...


ServiceFactory = Callable[[Config, Path, argparse.Namespace], Runnable]
AddArguments = Callable[[argparse.ArgumentParser], None]


def parse_arguments(
    service: str, description: str, add_arguments: AddArguments | None, arguments: list[str] | None
) -> argparse.Namespace:
    """The command line that all services share."""
    parser = argparse.ArgumentParser(
        prog=f"python -m services.{service}",
        description=description,
        epilog="Every key of the config can also be set in the environment, for example "
        "ROOKERY_LEARNER__BATCH_SIZE=512. To try one service against a running run, give it that run's "
        "config.yaml: it holds the endpoints.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="config.yaml (default: built-in defaults)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="overrides one key, for example learner.lr=3e-4",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="where state is kept (default: run.dir of the config, or .)",
    )
    parser.add_argument("--instance", metavar="NAME", help=f"a name for people (default: {service}-<random>)")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    parser.add_argument("--parent-fd", type=int, help=argparse.SUPPRESS)
    if add_arguments is not None:
        add_arguments(parser)
    options = parser.parse_args(arguments)
    options.instance = options.instance or f"{service}-{uuid.uuid4().hex[:6]}"
    return options


def main(
    service: str,
    description: str,
    factory: ServiceFactory,
    add_arguments: AddArguments | None = None,
    arguments: list[str] | None = None,
) -> int:
    """Runs one service until it ends; the exit code says whether to start it again."""
    options = parse_arguments(service, description, add_arguments, arguments)
    set_up_logging(service, options.instance, options.log_level)
    interrupt_nobody()  # before any thread is started
    if options.parent_fd is not None:
        end_with_parent(options.parent_fd)
    try:
        config = load_config(options.config, options.set)
        run_dir = options.run_dir or Path(config.run.dir or ".")
        factory(config, run_dir, options).run()
    except ConfigError as error:
        log.critical("the config cannot work", reason=str(error))
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the person at the terminal reads this one
        return 2
    except RookeryError as error:
        log.critical("ended by an error", error=type(error).__name__, reason=str(error))
        return 1
    return 0


def end_with_parent(parent_fd: int) -> None:
    """Ends this process when the other end of the pipe closes, which even a killed launcher cannot prevent.

    A thread of its own: the main thread may be deep in a computation.
    """

    def watch() -> None:
        while os.read(parent_fd, 1):
            pass
        log.warning("the launcher is gone; ending")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LAST_GRACE_S)  # not a wait for a condition: the hard limit on how long an orphan may live
        os._exit(70)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
