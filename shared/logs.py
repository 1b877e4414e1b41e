"""Structured logs: one line an event, with the service, its instance, the process and the thread.

On a terminal the lines are for people; into a file or a pipe they are JSON.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import MutableMapping
from typing import Any

import structlog


def set_up_logging(service: str, instance: str, level: str = "info") -> None:
    """Sets up structlog for this process; call once, at its start."""
    for_people = sys.stderr.isatty()
    renderer: Any = structlog.dev.ConsoleRenderer() if for_people else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _add_thread,
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, instance=instance, pid=os.getpid())


def _add_thread(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    event["thread"] = threading.current_thread().name
    return event


def get_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of this process."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return logger
