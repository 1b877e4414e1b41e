"""`rookery`: trains, evaluates, watches and pauses runs, and looks after their experience."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rookery.arguments import add_run_argument
from rookery.client import RunClient
from rookery.keys_command import add_keys_command
from rookery.launcher import Ending, Launcher
from rookery.ledger import add_ledger_command
from rookery.legs import Legs
from rookery.manifest import check_manifest, go_back, has_kept, is_at_rest, settle
from rookery.replay_commands import add_replay_command
from rookery.run_directory import RunDirectory, create_run, open_run, ports_are_free, with_free_ports
from rookery.status_command import add_status_command
from rookery.summary import draw_curves, write_summary
from rookery.view import View, agent_label
from services.param_server.run_config import check_continues
from shared.config import Config, build_config, load_config, merged
from shared.errors import ConfigError, PeerSilent, RookeryError
from shared.logs import set_up_logging
from shared.ownership import owned

if TYPE_CHECKING:
    from rookery.sequential import SequentialRun

INTERRUPTED = 130  # the exit code that shells give to what Ctrl-C ended
EVAL_SEED_OFFSET = 1_000_003  # greedy epochs are played on other seeds than training


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit code."""
    options = build_parser().parse_args(arguments)
    set_up_logging("rookery", "command-line", "warning")
    _see_modules_here()
    try:
        return int(options.command(options))
    except RookeryError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("ended at once", file=sys.stderr)
        return INTERRUPTED


def _see_modules_here() -> None:
    """Services, run with -m, find a world of one's own in this folder; evaluation must find it as well."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="rookery", description="Trains many independent reinforcement-learning agents at once."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train, as local processes",
        description="Starts replay, parameter server, learners and actors as local processes and trains. "
        "Ctrl-C ends the run cleanly; --resume continues it.",
    )
    train.add_argument(
        "config", nargs="?", type=Path, help="config.yaml (default: treasure hunt with 3 agents)"
    )
    train.add_argument("--actors", type=int, metavar="N", help="actor processes (actor.count)")
    train.add_argument("--agents", type=int, metavar="N", help="agents in the world (world.agents)")
    length = train.add_mutually_exclusive_group()
    length.add_argument(
        "--minutes", type=float, metavar="M", help="train for M minutes; with --resume: M more"
    )
    length.add_argument("--agent-steps", type=int, metavar="N", help="train for N steps, summed over agents")
    train.add_argument("--seed", type=int, metavar="S")
    train.add_argument(
        "--mode",
        choices=("async", "lockstep", "sequential"),
        help="async: everything at its own speed (default); lockstep: processes in rounds, repeatable bit "
        "for bit; sequential: the same in this one process, for a debugger",
    )
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/<world>-<time>")
    train.add_argument("--resume", type=Path, metavar="RUN", help="continue this run where it stopped")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override any config key"
    )
    train.set_defaults(command=train_command)

    evaluate = commands.add_parser("eval", help="play greedy episodes with a run's weights")
    add_run_argument(evaluate)
    evaluate.add_argument("--episodes", type=int, default=300, metavar="N")
    evaluate.add_argument("--version", type=int, metavar="V", help="of every agent (default: the newest)")
    evaluate.add_argument("--seed", type=int, metavar="S", help="default: derived from the run's seed")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.set_defaults(command=eval_command)

    add_status_command(commands)

    for action, text in (("pause", "hold a run: nothing is played or trained"), ("resume", "let it go on")):
        command = commands.add_parser(action, help=text)
        add_run_argument(command)
        command.set_defaults(command=control_command, action=action)

    add_replay_command(commands)
    add_ledger_command(commands)
    add_keys_command(commands)
    return parser


# --- train ----------------------------------------------------------------------------------------------


def train_command(options: argparse.Namespace) -> int:
    """`rookery train`."""
    with ExitStack() as owned_files:
        return _train(options, owned_files)


def _train(options: argparse.Namespace, owned_files: ExitStack) -> int:
    if options.resume:
        run, config = _resumed(options, owned_files)
    else:
        run, config = create_run(load_config(options.config, _settings(options)), options.run_dir)
        _own_rounds(run, config, owned_files)
    before = run.config() if options.resume else None
    run.write_config(config)
    sequential = config.parallel.mode == "sequential"
    view = View(config, live=not sequential)  # a live display and a debugger would fight for the terminal
    view.say(f"run {run.path}")
    try:
        ending = _runner(run, config, view).launch(resume=bool(options.resume))
    except ConfigError:
        if before is not None:
            run.write_config(before)  # what cannot work must not stay in the run
        raise
    finally:
        view.close()
    return _finish(run, config, view, ending)


def _runner(run: RunDirectory, config: Config, view: View) -> Launcher | Legs | SequentialRun:
    if config.parallel.mode == "async":
        return Launcher(run, config, view)
    if config.parallel.mode == "lockstep":
        return Legs(run, config, view)
    # torch is slow to load, and the launcher's processes load it themselves
    from rookery.sequential import SequentialRun  # noqa: PLC0415

    return SequentialRun(run, config, view)


def _settings(options: argparse.Namespace) -> list[str]:
    """The flags as settings; --set comes last and wins."""
    flags = {
        "actor.count": options.actors,
        "world.agents": options.agents,
        "seed": options.seed,
        "run.agent_steps": options.agent_steps,
        "run.minutes": options.minutes,
    }
    settings = [f"{key}={value}" for key, value in flags.items() if value is not None]
    if options.mode is not None:
        settings.append(f"parallel.enabled={str(options.mode != 'sequential').lower()}")
        settings.append(f"parallel.async_learning={str(options.mode == 'async').lower()}")
    if options.agent_steps is not None:
        settings.append("run.minutes=null")
    return [*settings, *options.set]


def _resumed(options: argparse.Namespace, owned_files: ExitStack) -> tuple[RunDirectory, Config]:
    for flag, value in (
        ("a config file", options.config),
        ("--run-dir", options.run_dir),
        ("--agents", options.agents),
    ):
        if value is not None:
            raise ConfigError(f"--resume continues a run with its own config; leave out {flag}")
    run = open_run(options.resume)
    settings = _settings(options)
    config = load_config(run.config_path, settings, environment={})
    _check_mode(run.config(), config)
    check_continues(run.config(), config)
    if options.minutes is not None:
        total_minutes = run.elapsed_s() / 60.0 + options.minutes
        config = build_config(merged(config.model_dump(mode="json"), {"run": {"minutes": total_minutes}}))
    free = ports_are_free(config)
    if not free:
        _refuse_if_running(run, config)
    if not free or len(config.endpoints.replay) != config.replay.services:  # now there may be more, or fewer
        config = with_free_ports(config, run.path)
    _own_rounds(run, config, owned_files)
    if config.parallel.mode != "async":
        _prepare_rounds(run, config)
    return run, config


def _own_rounds(run: RunDirectory, config: Config, owned_files: ExitStack) -> None:
    """Nobody else may train this run, nor put its files back, until this command ends."""
    if config.parallel.mode != "async":
        owned_files.enter_context(owned(run.lock_path))


def _check_mode(before: Config, now: Config) -> None:
    """A run in rounds goes on in rounds, in one process or in many; any other one does not."""
    if (before.parallel.mode == "async") != (now.parallel.mode == "async"):
        raise ConfigError(
            f"the run was trained in mode {before.parallel.mode} and cannot be continued in mode "
            f"{now.parallel.mode}; sequential and lockstep continue each other"
        )


def _prepare_rounds(run: RunDirectory, config: Config) -> None:
    """The files as they were between two rounds, proven; what was in the middle of one goes back."""
    if not is_at_rest(run) and not settle(run, run.config()):
        if not has_kept(run):
            raise ConfigError(
                f"{run.path} was ended in the middle of a round, before its first manifest: a run that is "
                "repeated bit for bit cannot go on from there; begin it anew"
            )
        go_back(run)
        print(f"{run.path} was ended in the middle of a round; it goes back to its last manifest")
    check_manifest(run, config)


def _refuse_if_running(run: RunDirectory, config: Config) -> None:
    try:
        with RunClient(config, timeout_s=1.0):
            raise ConfigError(f"{run.path} is running already; see `rookery status {run.path}`")
    except PeerSilent:
        return  # its ports belong to somebody else now


def _finish(run: RunDirectory, config: Config, view: View, ending: Ending) -> int:
    summary = write_summary(run, config, ending, {})  # first of all: whatever comes now may be interrupted
    if not ending.interrupted and config.run.eval_episodes:
        summary = write_summary(run, config, ending, _final_returns(run, config, view))
    picture = run.plots / "learning_curve.png"
    drawn = draw_curves(run, picture)
    _print_summary(view, run, config, summary)
    if drawn:
        view.say(f"curves  {picture}")
    if ending.interrupted:
        view.say(_how_to_go_on(run, ending))
    return 0


def _how_to_go_on(run: RunDirectory, ending: Ending) -> str:
    if not ending.ended_at_once:
        return f"continue with: rookery train --resume {run.path}"
    if has_kept(run):
        return f"rookery train --resume {run.path} goes back to its last manifest and continues from there"
    return "ended in the middle of a round, before its first manifest: it may have to be begun anew"


def _final_returns(run: RunDirectory, config: Config, view: View) -> dict[str, float | None]:
    view.say(f"playing {config.run.eval_episodes} greedy epochs")
    try:
        played = evaluate_run(run, config.run.eval_episodes, None, None)
    except (RookeryError, KeyboardInterrupt) as error:
        view.say(f"no greedy epochs: {error or 'interrupted'}")
        return {}
    return {agent: float(returns.mean()) for agent, returns in played["returns"].items()}


def _print_summary(view: View, run: RunDirectory, config: Config, summary: dict[str, Any]) -> None:
    view.say(
        f"{summary['epochs']:,} epochs, {summary['agent_steps']:,} agent steps "
        f"in {summary['elapsed_s']:.0f} s ({summary['agent_steps_per_s']:,.0f}/s)"
    )
    for agent, figures in summary["agents"].items():
        evaluation = figures["eval_return"]
        trained = f", {figures['updates']:,} updates ({figures['updates_per_s']:.0f}/s)"
        view.say(
            f"  {agent_label(config, agent)}: return {figures['first_return']} -> {figures['last_return']}"
            + (f", greedy {evaluation:.1f}" if evaluation is not None else "")
            + (f"{trained}, version {figures['version']}" if config.learns(agent) else "")
        )
    if summary["ledger"]:
        view.say("ledger  " + ", ".join(f"{name} {value:,}" for name, value in summary["ledger"].items()))
    view.say(f"summary {run.summary_path}")


# --- eval, pause, resume --------------------------------------------------------------------------------


def evaluate_run(run: RunDirectory, episodes: int, version: int | None, seed: int | None) -> dict[str, Any]:
    """Greedy returns by agent, the versions that played (0: nothing is learned), and the run's config."""
    # torch is slow to load and only needed here
    from services.actor.evaluation import PolicyWeights, greedy_returns  # noqa: PLC0415

    config = run.config()
    agents = run.agents()
    if not agents:
        raise ConfigError(f"{run.path} has no weights yet: nothing was trained")
    stored = {agent: run.weights(agent, version) for agent in agents if config.learns(agent)}
    weights = {agent: PolicyWeights(own.version, own.tensors) for agent, own in stored.items()}
    played_seed = config.seed + EVAL_SEED_OFFSET if seed is None else seed
    returns = greedy_returns(config, weights, episodes, played_seed)
    versions = {agent: weights[agent].version if agent in weights else 0 for agent in returns}
    return {"returns": returns, "versions": versions, "config": config}


def eval_command(options: argparse.Namespace) -> int:
    """`rookery eval`."""
    if options.episodes < 1:
        raise ConfigError(f"--episodes {options.episodes}: at least 1")
    played = evaluate_run(open_run(options.run), options.episodes, options.version, options.seed)
    config: Config = played["config"]
    returns: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = played["returns"]
    result = {
        "episodes": options.episodes,
        "mean_return": float(np.mean([values.mean() for values in returns.values()])),
        "agents": {
            agent: {
                "algorithm": config.algorithm_of(agent),
                "version": played["versions"][agent],
                "eval_return": float(values.mean()),
                "standard_error": float(values.std() / np.sqrt(len(values))),
            }
            for agent, values in returns.items()
        },
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    for agent, figures in result["agents"].items():
        mean, error = figures["eval_return"], figures["standard_error"]
        who = f"version {figures['version']}" if config.learns(agent) else figures["algorithm"]
        print(f"{agent}  {mean:8.2f} +- {error:.2f}  {who}")
    print(f"mean     {result['mean_return']:8.2f}  over {options.episodes} greedy epochs")
    return 0


def control_command(options: argparse.Namespace) -> int:
    """`rookery pause` and `rookery resume`."""
    run = open_run(options.run)
    with RunClient(run.config()) as client:
        print(f"{run.path} is {client.control(options.action).state}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
