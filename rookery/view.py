"""What a person sees while a run goes on: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shared.config import Config
from shared.messages import RunStatus, ServiceStatus

PLAIN_EVERY_S = 10.0


class View:
    """Shows a run's status as it comes."""

    def __init__(self, config: Config, console: Console | None = None, live: bool = True) -> None:
        self.console = console or Console()
        self._config = config
        live = live and self.console.is_terminal
        self._live = Live(console=self.console, auto_refresh=False) if live else None
        self._last_plain = -1e9
        self._last_state = ""
        if self._live:
            self._live.start()

    def show(self, status: RunStatus, restarts: int) -> None:
        if self._live:
            self._live.update(render_progress(status, self._config, restarts), refresh=True)
            return
        now = time.monotonic()
        if now - self._last_plain >= PLAIN_EVERY_S or status.state != self._last_state:
            self._last_plain, self._last_state = now, status.state
            self.console.print(headline(status, self._config, restarts), highlight=False, soft_wrap=True)
            for agent in status.agents:
                row = _plain_agent(status, self._config, agent)
                self.console.print("  " + row, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        if self._live:
            self._live.stop()


def render_progress(status: RunStatus, config: Config, restarts: int) -> Group:
    """The headline, one row for each agent, and who waits for whom."""
    table = Table(box=None, pad_edge=False)
    table.add_column("agent")
    for name in ("return", "loss", "updates/s", "steps/s", "version", "lag", "replay"):
        table.add_column(name, justify="right")
    for agent in status.agents:
        table.add_row(agent_label(config, agent), *agent_cells(status, agent))
    waits = [
        f"{service.instance} waits for {service.waiting_for}"
        for service in status.services
        if service.waiting_for
    ]
    headings = Text(headline(status, config, restarts), style="bold")
    failed = (Text(line, style="red") for line in failure_lines(status))
    return Group(headings, table, *(Text(line, style="dim") for line in waits[:4]), *failed)


def failure_lines(status: RunStatus) -> list[str]:
    """Whoever had to be started again, how often, and why the last time."""
    return [
        f"{instance} failed {own.count} time{'s' if own.count > 1 else ''}, "
        f"the last {own.seen_s:.0f} s ago: {_first_line(own.reason)}"
        for instance, own in status.failures.items()
    ]


def headline(status: RunStatus, config: Config, restarts: int) -> str:
    """The run as a whole in one line."""
    limit = f" of {config.run.minutes * 60:.0f}" if config.run.minutes else ""
    parts = [
        status.state,
        f"{status.elapsed_s:.0f}{limit} s",
        f"epoch {status.epochs:,}",
        f"{status.agent_steps:,} agent steps",
        f"{total(status, 'env_steps_per_s'):,.0f} env steps/s",
        f"{total(status, 'updates_per_s'):,.0f} updates/s",
    ]
    if restarts:
        parts.append(f"{restarts} restarts")
    return " | ".join(parts)


def agent_label(config: Config, agent: str) -> str:
    """The agent's name; of one that learns nothing also why: "agent_2 (scripted)"."""
    return agent if config.learns(agent) else f"{agent} ({config.algorithm_of(agent)})"


def agent_cells(status: RunStatus, agent: str) -> list[str]:
    """return, loss, updates/s, steps/s, version, lag, replay fill."""
    own, seen = status.agents[agent], learner_metrics(status, agent)
    fill = next((s.metrics[f"fill.{agent}"] for s in status.services if f"fill.{agent}" in s.metrics), None)
    return [
        _number(own.recent_return, ".1f"),
        _number(seen.get("loss"), ".4f"),
        _number(seen.get("updates_per_s"), ".0f"),
        _number(total(status, "env_steps_per_s"), ",.0f"),
        str(own.version),
        _number(policy_lag(status, agent), ".1f"),
        _number(fill, ".0%"),
    ]


def policy_lag(status: RunStatus, agent: str) -> float | None:
    """How many versions the actors are behind the newest one, on average."""
    newest = status.agents[agent].version
    held = [s.metrics[f"version.{agent}"] for s in status.services if f"version.{agent}" in s.metrics]
    return sum(newest - version for version in held) / len(held) if held else None


def learner_metrics(status: RunStatus, agent: str) -> dict[str, float]:
    """What the agent's learner last said of itself."""
    return next((s.metrics for s in status.services if s.service == "learner" and s.holds == agent), {})


def total(status: RunStatus, metric: str) -> float:
    """A figure summed over all services."""
    return sum(service.metrics.get(metric, 0.0) for service in status.services)


def render_status(status: RunStatus, config: Config) -> Group:
    """`rookery status`: what runs, since when, how fast, how stale, who waits for whom."""
    services = Table(box=None, pad_edge=False, title="services", title_justify="left")
    for name in ("instance", "holds", "pid", "host", "up", "seen", "ready", "waits for"):
        services.add_column(name)
    for service in status.services:
        services.add_row(*(Text(cell) for cell in _service_cells(service)))
    restarts = sum(own.count for own in status.failures.values())
    return Group(render_progress(status, config, restarts), Text(""), services)


def _service_cells(service: ServiceStatus) -> list[str]:
    return [
        service.instance,
        service.holds,
        str(service.pid),
        service.host,
        _duration(service.up_s),
        f"{service.seen_s:.1f} s ago",
        "yes" if service.ready else "not yet",
        service.waiting_for,
    ]


def _plain_agent(status: RunStatus, config: Config, agent: str) -> str:
    names = ("return", "loss", "updates/s", "steps/s", "version", "lag", "replay")
    cells = zip(names, agent_cells(status, agent), strict=True)
    return f"{agent_label(config, agent)}: " + ", ".join(f"{name} {cell}" for name, cell in cells)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "ended"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
