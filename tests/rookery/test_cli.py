from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rookery import cli, status_command
from rookery.client import RunClient
from rookery.run_directory import RunDirectory, create_run
from services.param_server.progress import Progress
from services.param_server.spec_book import SpecBook
from services.param_server.versions import VersionStore
from shared import ownership
from shared.config import NetworkConfig, load_config
from shared.messages import EpochSummary
from shared.networks import QNetwork
from worlds.registry import build_world


@pytest.fixture(autouse=True)
def _quiet_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of this process is the tests' own, and nobody waits long for runs that are dead."""
    monkeypatch.setattr(cli, "set_up_logging", lambda *_names: None)
    for module in (cli, status_command):
        monkeypatch.setattr(module, "RunClient", functools.partial(RunClient, timeout_s=0.2))


def make_run(path: Path, *more: str) -> RunDirectory:
    settings = ["world.agents=2", "world.max_turns=3", "learner.network.hidden=[4]", "seed=1", *more]
    return create_run(load_config(None, settings, {}), path)[0]


def make_trained_run(path: Path) -> RunDirectory:
    run = make_run(path)
    config = run.config()
    specs = build_world(config.world, 1, 0).specs
    (path / "params").mkdir()
    SpecBook(path / "params" / "specs.json").register(specs)
    store = VersionStore(path / "params" / "agents", keep=10)
    for agent, spec in specs.items():
        network = QNetwork(spec, NetworkConfig(hidden=(4,)))
        tensors = {name: value.numpy() for name, value in network.state_dict().items()}
        for number in range(2):
            store.publish(agent, tensors, publish_id=f"p{number}", updates=number, token=1)
    return run


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["status"], ["pause"], ["resume"]])
def test_help_of_every_command_exits_with_0(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help is never an error."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: rookery" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["dance"], "invalid choice"),
        (["eval"], "RUN"),
        (["train", "--actors", "many"], "invalid int value"),
        (["train", "--minutes", "1", "--agent-steps", "5"], "not allowed with"),
        (["status", "here", "--loud"], "--loud"),
    ],
)
def test_arguments_that_make_no_sense_exit_with_2_and_the_usage(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line says what it expected."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "learner.batchsize=5"], "did you mean learner.batch_size?"),
        (["--set", "learner.gamma=2"], "less than 1"),
        (["--set", "nonsense"], "key=value"),
        (["--actors", "0"], "actor.count"),
        (["--agents", "0"], "world.agents"),
        (["--minutes", "-1"], "run.minutes"),
        (["nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_train_with_a_wrong_setting_exits_with_2_and_makes_no_run(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mistakes in the config are found before anything is created or started."""
    target = tmp_path / "run"
    assert cli.main(["train", "--run-dir", str(target), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert not target.exists()


def test_train_into_a_directory_that_is_not_empty_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is never overwritten; the way to continue it is said."""
    (tmp_path / "something").touch()
    assert cli.main(["train", "--run-dir", str(tmp_path)]) == 2
    assert "--resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["other.yaml"], ["--run-dir", "elsewhere"], ["--agents", "3"]],
    ids=["config", "dir", "agents"],
)
def test_train_resume_with_what_a_run_cannot_change_exits_with_2(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is continued with its own config."""
    make_run(tmp_path)
    assert cli.main(["train", "--resume", str(tmp_path), *arguments]) == 2
    assert "leave out" in capsys.readouterr().err


def test_train_resume_with_an_agent_that_learned_made_random_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its experience would be left behind and missing in the ledger; the run stays as it was."""
    run = make_run(tmp_path)
    setting = "agents.agent_1.algorithm=random"
    assert cli.main(["train", "--resume", str(tmp_path), "--set", setting]) == 2
    expected = "agent_1 learned with 'dqn' in this run and cannot become random"
    assert expected in capsys.readouterr().err
    assert run.config().learning_agents == ("agent_0", "agent_1")


@pytest.mark.parametrize("command", [["train", "--resume"], ["eval"], ["status"], ["pause"], ["resume"]])
def test_command_on_a_directory_that_is_no_run_exits_with_2(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the directory and what it lacks."""
    assert cli.main([*command, str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run" in capsys.readouterr().err


def test_status_of_a_dead_run_says_so_and_how_to_continue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is not running is not an error."""
    run = make_run(tmp_path)
    assert cli.main(["status", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "is not running; 0 s trained so far" in text
    assert f"rookery train --resume {tmp_path}" in text
    run.summary_path.write_text('{"epochs": 3}')
    assert cli.main(["status", str(tmp_path)]) == 0
    assert str(run.summary_path) in capsys.readouterr().out


def test_status_of_a_dead_run_as_json_has_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs get the same."""
    make_run(tmp_path).summary_path.write_text('{"epochs": 3}')
    assert cli.main(["status", "--json", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"state": "not running", "elapsed_s": 0.0, "summary": {"epochs": 3}}


@pytest.mark.parametrize("command", ["pause", "resume"])
def test_control_of_a_dead_run_exits_with_1(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nobody to hold or to let go."""
    make_run(tmp_path)
    assert cli.main([command, str(tmp_path)]) == 1
    assert "not running" in capsys.readouterr().err


def test_eval_of_a_run_without_weights_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was trained, or nothing was published yet."""
    run = make_run(tmp_path)
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "no weights yet: nothing was trained" in capsys.readouterr().err
    (tmp_path / "params").mkdir()
    SpecBook(tmp_path / "params" / "specs.json").register(build_world(run.config().world, 1, 0).specs)
    assert cli.main(["eval", str(tmp_path)]) == 2
    assert "no weights of agent_0 yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--episodes", "0"], "at least 1"), (["--version", "9"], "no version 9")]
)
def test_eval_of_what_is_not_there_exits_with_2(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No episodes and no such version are refused."""
    make_trained_run(tmp_path)
    assert cli.main(["eval", str(tmp_path), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_eval_plays_the_newest_weights_and_repeats_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Returns of every agent with their version; the same seed gives the same numbers."""
    make_trained_run(tmp_path)
    answers = []
    for _ in range(2):
        assert cli.main(["eval", str(tmp_path), "--episodes", "5", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    assert answers[0]["episodes"] == 5
    assert {own["version"] for own in answers[0]["agents"].values()} == {2}
    means = [own["eval_return"] for own in answers[0]["agents"].values()]
    assert answers[0]["mean_return"] == pytest.approx(np.mean(means))


def test_eval_for_people_prints_one_line_for_each_agent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table ends with the mean."""
    make_trained_run(tmp_path)
    assert cli.main(["eval", str(tmp_path), "--episodes", "2", "--version", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["agent_0", "agent_1", "mean"]
    assert "version 1" in lines[0]


def test_flags_of_train_become_settings_and_set_wins() -> None:
    """A number of steps takes the limit on time away."""
    options = cli.build_parser().parse_args(
        ["train", "--actors", "2", "--agent-steps", "10", "--seed", "3", "--set", "seed=4"]
    )
    config = load_config(None, cli._settings(options), {})
    assert (config.actor.count, config.run.agent_steps, config.run.minutes, config.seed) == (2, 10, None, 4)


@pytest.mark.parametrize("mode", ["async", "lockstep", "sequential"])
def test_mode_flag_becomes_the_keys_of_parallel(mode: str) -> None:
    """And --set may still say otherwise."""
    options = cli.build_parser().parse_args(["train", "--mode", mode])
    assert load_config(None, cli._settings(options), {}).parallel.mode == mode
    options = cli.build_parser().parse_args(["train", "--mode", mode, "--set", "parallel.enabled=false"])
    assert load_config(None, cli._settings(options), {}).parallel.mode == "sequential"


@pytest.mark.parametrize(
    ("before", "now"),
    [("async", "lockstep"), ("async", "sequential"), ("lockstep", "async"), ("sequential", "async")],
)
def test_train_resume_in_a_mode_that_cannot_continue_it_exits_with_2(
    before: str, now: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs in rounds and those that are not have different states; the message says who continues whom."""
    make_run(
        tmp_path, f"parallel.enabled={before != 'sequential'}", f"parallel.async_learning={before == 'async'}"
    )
    config = (tmp_path / "config.yaml").read_text()
    assert cli.main(["train", "--resume", str(tmp_path), "--mode", now]) == 2
    said = capsys.readouterr().err
    assert f"trained in mode {before} and cannot be continued in mode {now}" in said
    assert "sequential and lockstep continue each other" in said
    assert (tmp_path / "config.yaml").read_text() == config


@pytest.mark.parametrize("now", ["lockstep", "sequential"])
def test_train_resume_of_rounds_that_were_never_played_exits_with_2(
    now: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other mode of rounds is allowed; that there is nothing to continue is said in words."""
    make_run(tmp_path, "parallel.async_learning=false")
    assert cli.main(["train", "--resume", str(tmp_path), "--mode", now]) == 2
    assert "was ended in the middle of a round, before its first manifest" in capsys.readouterr().err


def test_train_resume_of_rounds_that_somebody_trains_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequential run has no ports to be recognised by; its files must not be put back under it."""
    monkeypatch.setattr(ownership, "PATIENCE_S", 0.0)
    run = make_run(tmp_path, "parallel.enabled=false")
    (tmp_path / "manifest").mkdir()
    (tmp_path / "params").mkdir()
    with ownership.owned(run.lock_path):
        assert cli.main(["train", "--resume", str(tmp_path)]) == 2
    assert f"belongs to a running process (pid {os.getpid()})" in capsys.readouterr().err
    assert (tmp_path / "params").exists()


def test_status_of_a_sequential_run_that_trains_is_read_from_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It answers no questions, and yet it is not dead."""
    run = make_run(tmp_path, "parallel.enabled=false")
    progress = Progress(run.progress_path)
    summary = EpochSummary(number=1, epochs=2, env_steps=6, agent_steps=12, return_sums={})
    progress.take("0" * 32, 0, summary, 1.0)
    progress.close()
    with ownership.owned(run.lock_path):
        assert cli.main(["status", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        assert cli.main(["status", "--json", str(tmp_path)]) == 0
        answer = json.loads(capsys.readouterr().out)
    assert f"trains in mode sequential in one process (pid {os.getpid()})" in text
    assert "0 s, 2 epochs, 12 agent steps" in text
    assert (answer["state"], answer["mode"], answer["agent_steps"]) == ("running", "sequential", 12)
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "is not running" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["pause"], ["resume"]])
def test_control_of_a_sequential_run_says_why_nobody_answers(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not that it is not running: it may well be."""
    make_run(tmp_path, "parallel.enabled=false")
    assert cli.main([*command, str(tmp_path)]) == 1
    assert "the run is sequential: one process without sockets" in capsys.readouterr().err


def test_command_ended_by_ctrl_c_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As shells expect it, without a traceback."""

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "evaluate_run", interrupted)
    make_run(tmp_path)
    assert cli.main(["eval", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "ended at once\n"


def test_command_line_as_a_process_exits_with_2_on_an_unknown_key(tmp_path: Path) -> None:
    """The whole way, as a person types it: one line on stderr, no traceback."""
    command = [sys.executable, "-m", "rookery.cli", "train", "--run-dir", str(tmp_path / "run")]
    ended = subprocess.run(
        [*command, "--set", "learner.batchsize=5"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr == "error: unknown key learner.batchsize; did you mean learner.batch_size?\n"


def test_world_in_the_current_folder_is_found_like_the_services_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rookery eval` builds the world in its own process: what trained there must also be evaluated."""
    (tmp_path / "world_in_this_folder.py").write_text("HERE = True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert cli.main(["status", "nowhere"]) == 2
    assert importlib.import_module("world_in_this_folder").HERE
    monkeypatch.delitem(sys.modules, "world_in_this_folder")
