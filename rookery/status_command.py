"""`rookery status RUN`: asked of the run's services, or read from its files where nobody answers."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

from rookery.arguments import add_run_argument
from rookery.client import RunClient
from rookery.run_directory import RunDirectory, open_run, read_progress
from rookery.view import render_status
from shared.config import Config
from shared.errors import PeerSilent
from shared.ownership import owner_of


def add_status_command(commands: Any) -> None:
    """`rookery status`."""
    status = commands.add_parser("status", help="what runs, how fast, how stale, who waits for whom")
    add_run_argument(status)
    status.add_argument("--json", action="store_true", help="print JSON")
    status.set_defaults(command=status_command)


def status_command(options: argparse.Namespace) -> int:
    """`rookery status`."""
    run = open_run(options.run)
    config = run.config()
    try:
        with RunClient(config) as client:
            status, replays = client.status(), client.replay_stats()
    except PeerSilent:
        return _status_of_the_silent(run, config, options.json)
    if options.json:
        answer = status.model_dump(mode="json")
        answer["replay"] = [stats.model_dump(mode="json") if stats else None for stats in replays]
        print(json.dumps(answer, indent=2))
        return 0
    console = Console()
    console.print(render_status(status, config))
    for number, stats in enumerate(replays):
        if stats is None:
            console.print(f"replay-{number} does not answer", highlight=False, markup=False)
            continue
        for agent, buffer in stats.buffers.items():
            limiter = buffer.limiter
            blocked = (
                f"; {limiter.blocked} blocked for {limiter.since_s:.1f} s: {limiter.reason}"
                if limiter.blocked
                else ""
            )
            console.print(
                f"replay-{number} {agent}: {buffer.drawable_steps:,} of {buffer.capacity_steps:,} steps, "
                f"{buffer.held_requests} requests held{blocked}",
                highlight=False,
                markup=False,
            )
    return 0


def _status_of_the_silent(run: RunDirectory, config: Config, as_json: bool) -> int:
    """Of a run that nobody answers for: from its files."""
    pid = owner_of(run.lock_path)
    summary = json.loads(run.summary_path.read_text()) if run.summary_path.exists() else None
    progress = read_progress(run.progress_path)
    played = {name: sum(line[name] for line in progress) for name in ("epochs", "agent_steps")}
    if as_json:
        state = "running" if pid else "not running"
        answer = {"state": state, "elapsed_s": run.elapsed_s(), "summary": summary}
        print(
            json.dumps(
                answer | ({"mode": config.parallel.mode, "pid": pid, **played} if pid else {}), indent=2
            )
        )
        return 0
    if pid:
        what = "in one process" if config.parallel.mode == "sequential" else "and is between two legs"
        print(f"{run.path} trains in mode {config.parallel.mode} {what} (pid {pid})")
        print(f"{run.elapsed_s():.0f} s, {played['epochs']:,} epochs, {played['agent_steps']:,} agent steps")
        return 0
    print(f"{run.path} is not running; {run.elapsed_s():.0f} s trained so far")
    if summary:
        print(f"its summary: {run.summary_path}")
    print(f"continue with: rookery train --resume {run.path}")
    return 0
