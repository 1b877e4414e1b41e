from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.algorithms import BUILT_IN
from shared.config import Config, LearnerConfig, build_config, dump_config, known_keys, load_config, merged
from shared.config.learner import ALGORITHMS
from shared.errors import ConfigError


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text)
    return path


def load(*settings: str, **environment: str) -> Config:
    return load_config(None, settings, environment)


def refusal(*settings: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*settings, **environment)
    return str(caught.value)


def test_config_from_nothing_has_the_defaults() -> None:
    """No file, no environment and no flags is a config that works."""
    assert load() == Config()


def test_value_in_file_environment_and_flag_is_the_last_ones(tmp_path: Path) -> None:
    """The file beats the defaults, the environment the file, a flag the environment."""
    path = write(tmp_path, "learner: {batch_size: 1, n_step: 2, gamma: 0.5}\nseed: 4\n")
    environment = {"ROOKERY_LEARNER__BATCH_SIZE": "10", "ROOKERY_LEARNER__N_STEP": "20", "HOME": "/"}
    config = load_config(path, ["learner.batch_size=100"], environment)
    learner = config.learner
    assert (learner.batch_size, learner.n_step, learner.gamma, config.seed) == (100, 20, 0.5, 4)
    assert learner.lr == LearnerConfig().lr


def test_setting_given_twice_is_the_later_one() -> None:
    """Flags are read from left to right."""
    assert load("seed=1", "seed=2").seed == 2


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("learner.lr=1e-3", 1e-3),
        ("learner.lr=0.5", 0.5),
        ("run.minutes=null", None),
        ("learner.network.hidden=[3, 4]", (3, 4)),
        ("learner.double=false", False),
        ("world.options.speed=fast", "fast"),
        ("world.options={a: {b: 1}}", {"b": 1}),
        ("agents.agent_1.gamma=0.5", 0.5),
    ],
)
def test_setting_of_each_type_is_read_as_yaml(setting: str, expected: object) -> None:
    """Numbers, null, lists, booleans, texts and mappings are all written as in the file."""
    key = setting.partition("=")[0].split(".")
    value: object = load(setting)
    for part in [*key, "a"] if key == ["world", "options"] else key:
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    assert value == expected


@pytest.mark.parametrize("setting", ["seed", "=3", ""])
def test_setting_without_key_or_value_says_how_to_write_it(setting: str) -> None:
    """A flag that is not key=value is refused with an example."""
    assert "key=value" in refusal(setting)


def test_setting_that_is_not_yaml_names_itself() -> None:
    """A value that YAML cannot read is refused with where it stood."""
    assert "--set seed: '[1'" in refusal("seed=[1")
    assert "ROOKERY_SEED: '[1'" in refusal(ROOKERY_SEED="[1")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("sed", "seed"),
        ("learner.batchsize", "learner.batch_size"),
        ("learner.priority.alfa", "learner.priority.alpha"),
        ("learner.batch_sise", "learner.batch_size"),
        ("learner.priority.epsilo", "learner.priority.epsilon"),
        ("batch_size", "learner.batch_size"),
        ("param_server.lease", "param_server.lease_s"),
        ("agents.agent_1.batchsize", "agents.agent_1.batch_size"),
        ("agents.agent_1.priority.alfa", "agents.agent_1.priority.alpha"),
    ],
)
def test_unknown_key_names_itself_and_the_nearest_right_one(key: str, hint: str) -> None:
    """A slip of the pen is answered with what was meant, at any depth."""
    text = refusal(f"{key}=1")
    assert f"unknown key {key}; did you mean {hint}?" in text


def test_unknown_key_in_a_file_names_itself_and_the_nearest_right_one(tmp_path: Path) -> None:
    """The file is read as strictly as flags."""
    with pytest.raises(ConfigError, match=r"unknown key actor\.env; did you mean actor\.envs\?"):
        load_config(write(tmp_path, "actor: {env: 3}"), environment={})


def test_unknown_key_from_the_environment_names_itself_and_the_nearest_right_one() -> None:
    """A variable with our prefix that means nothing is an error, not ignored."""
    text = refusal(ROOKERY_LEARNER__BATCHSIZE="1")
    assert "unknown key learner.batchsize; did you mean learner.batch_size?" in text


def test_unknown_key_like_nothing_at_all_has_no_hint() -> None:
    """No guess is better than a silly one."""
    assert refusal("xyzzyxyzzy=1") == "unknown key xyzzyxyzzy"


def test_several_wrong_keys_are_all_named_at_once() -> None:
    """One round of repairs is enough."""
    text = refusal("sed=1", "learner.gama=0.5", "learner.lr=-1")
    assert text.count("\n") == 2
    for part in ("sed", "learner.gama", "learner.lr"):
        assert part in text


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("seed", "-1", "greater than or equal to 0"),
        ("learner.gamma", "1.0", "less than 1"),
        ("learner.lr", "0", "greater than 0"),
        ("learner.target.mode", "gentle", "'soft', 'hard' or 'both'"),
        ("learner.network.hidden", "[]", "at least 1"),
        ("world.agents", "0", "greater than or equal to 1"),
        ("actor.count", "many", "valid integer"),
        ("actor.journal", "perhaps", "valid boolean"),
        ("run.minutes", "-2", "greater than 0"),
        ("learner", "3", "LearnerConfig"),
        ("agents.agent_1.gamma", "2", "less than 1"),
    ],
)
def test_impossible_value_names_key_value_and_rule(key: str, value: str, rule: str) -> None:
    """The message is enough to repair it: which key, what it was, what is allowed."""
    text = refusal(f"{key}={value}")
    assert key in text
    assert value in text
    assert rule in text


def test_agent_id_that_cannot_name_a_directory_is_refused() -> None:
    """Agent ids become file names."""
    with pytest.raises(ConfigError, match=r"agents"):
        build_config({"agents": {"../up": {}}})


def test_min_steps_above_capacity_is_refused_with_both_numbers() -> None:
    """A buffer that never has enough would never give a batch."""
    text = refusal("replay.min_steps=1000", "replay.capacity_steps=999")
    assert "replay.min_steps (1000)" in text
    assert "replay.capacity_steps (999)" in text
    assert load("replay.min_steps=999", "replay.capacity_steps=999").replay.min_steps == 999


def test_lease_below_two_heartbeats_is_refused_with_both_numbers() -> None:
    """One late heartbeat must not lose a lease."""
    text = refusal("param_server.lease_s=1.9", "param_server.heartbeat_s=1")
    assert "lease_s (1.9)" in text
    assert "heartbeat_s (1.0)" in text
    assert load("param_server.lease_s=2", "param_server.heartbeat_s=1").param_server.lease_s == 2


def test_learner_for_an_agent_with_overrides_merges_them_section_by_section() -> None:
    """An override changes its own value and leaves the rest of its section alone."""
    config = load(
        "learner.priority.alpha=0.3",
        "learner.lr=0.01",
        "agents.agent_1.priority.beta_start=0.9",
        "agents.agent_1.network.hidden=[7]",
    )
    own = config.learner_for("agent_1")
    assert (own.priority.alpha, own.priority.beta_start, own.lr, own.network.hidden) == (0.3, 0.9, 0.01, (7,))
    assert own.network.dueling
    assert config.learner_for("agent_0") == config.learner


def test_agent_override_for_a_whole_section_that_is_no_section_is_refused() -> None:
    """`agents: {agent_1: 3}` says nothing that could be merged."""
    assert "agents.agent_1" in refusal("agents.agent_1=3")


def test_dumped_config_loads_as_the_same(tmp_path: Path) -> None:
    """What is written into the run directory is the whole config."""
    config = load(
        "seed=9223372036854775807",
        "learner.lr=3e-7",
        "run.minutes=null",
        "agents.agent_1.network.hidden=[7]",
        "world.options={a: [1, x]}",
    )
    assert load_config(write(tmp_path, dump_config(config)), environment={}) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "is not YAML"),
        ("a: b: c", "is not YAML"),
        ("- 1\n- 2", "expected keys and values at the top, found list"),
        ("just words", "found str"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        ("1: 2", "1"),
    ],
    ids=["open", "colons", "list", "text", "code", "number"],
)
def test_file_that_is_not_a_config_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    """Broken YAML, other shapes and YAML that would execute something are ConfigError."""
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text), environment={})
    assert words in str(caught.value)


def test_file_that_is_not_text_is_refused_in_words(tmp_path: Path) -> None:
    """A picture given as a config is ConfigError too."""
    path = tmp_path / "picture.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ConfigError, match=r"picture\.png"):
        load_config(path, environment={})


def test_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    """A missing file names itself."""
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml", environment={})


def test_empty_file_has_the_defaults(tmp_path: Path) -> None:
    """An empty file sets nothing."""
    assert load_config(write(tmp_path, "# nothing\n"), environment={}) == Config()


def test_merged_sections_leave_their_sources_as_they_were() -> None:
    """Merging makes a new mapping."""
    base, over = {"a": {"b": 1}, "c": 2}, {"a": {"d": 3}, "c": {"e": 4}}
    assert merged(base, over) == {"a": {"b": 1, "d": 3}, "c": {"e": 4}}
    assert base == {"a": {"b": 1}, "c": 2}


def test_segment_longer_than_an_epoch_is_as_long_as_the_epoch() -> None:
    """A segment never spans two epochs."""
    assert load("actor.segment_steps=64", "world.max_turns=50").segment_steps == 50
    assert load("actor.segment_steps=16", "world.max_turns=50").segment_steps == 16


def test_known_keys_name_sections_and_their_values() -> None:
    """Hints are made from this list."""
    keys = known_keys(Config)
    assert {"seed", "learner", "learner.target.tau", "endpoints.params"} <= set(keys)
    assert len(keys) == len(set(keys))


def test_overrides_of_an_agent_that_does_not_exist_are_refused() -> None:
    """A typing error in an agent's id would otherwise be ignored without a word."""
    with pytest.raises(ConfigError, match=r"agent_3: no such agent.*agent_0 to agent_2"):
        load_config(settings=["agents.agent_3.lr=1e-4"], environment={})


def test_placement_of_replay_services_is_read_from_file_environment_and_flags(tmp_path: Path) -> None:
    """The map is merged agent by agent, like every other section."""
    path = write(tmp_path, "replay: {services: 3, placement: {agent_0: 0, agent_1: 1}}")
    environment = {"ROOKERY_REPLAY__PLACEMENT__AGENT_1": "2"}
    config = load_config(path, ["replay.placement.agent_2=1"], environment)
    assert config.replay.placement == {"agent_0": 0, "agent_1": 2, "agent_2": 1}
    assert load_config(write(tmp_path, dump_config(config)), environment={}) == config


def test_placement_of_an_agent_that_does_not_exist_is_refused() -> None:
    """The message names the key and the agents that there are, as it does for `agents`."""
    text = refusal("replay.services=2", "replay.placement.agent_3=1")
    assert text == (
        "replay.placement.agent_3: no such agent; with world.agents = 3 they are agent_0 to agent_2"
    )


@pytest.mark.parametrize(("services", "number"), [(1, 1), (2, 2), (2, -1)])
def test_placement_on_a_replay_service_that_does_not_exist_is_refused(services: int, number: int) -> None:
    """The message names the key, its value and the numbers that there are."""
    text = refusal(f"replay.services={services}", f"replay.placement.agent_1={number}")
    assert f"replay.placement.agent_1 = {number}: no such replay service" in text
    assert f"with replay.services = {services} they are 0 to {services - 1}" in text


def test_placement_that_is_no_number_names_its_key() -> None:
    """Replay services have numbers, not names."""
    text = refusal("replay.services=2", "replay.placement.agent_1=replay-1")
    assert "replay.placement.agent_1 = 'replay-1'" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "dnq",
            r"learner\.algorithm: no built-in algorithm is called 'dnq'; did you mean dqn\? Known",
        ),
        ("zzzzz", r"is called 'zzzzz'; Known are dqn, iqn, hybrid, random, scripted; one of your own"),
        ("examples.expected_sarsa:", r"is called 'examples.expected_sarsa:'"),
        (":Mine", r"is called ':Mine'"),
    ],
)
def test_algorithm_that_nobody_knows_is_refused_before_anything_starts(name: str, says: str) -> None:
    """The nearest name and how to write one's own."""
    with pytest.raises(ConfigError, match=says):
        build_config({"learner": {"algorithm": name}})


def test_algorithm_names_of_the_config_are_those_that_can_be_found() -> None:
    """Two lists of the same names: one that needs no torch, one that knows where they are."""
    assert set(ALGORITHMS) == set(BUILT_IN)


def test_agents_that_learn_are_those_with_an_algorithm_that_trains() -> None:
    """Random and scripted agents are not among them, whether named by themselves or by `learner`."""
    config = build_config({"agents": {"agent_1": {"algorithm": "random"}}})
    assert config.learning_agents == ("agent_0", "agent_2")
    config = build_config(
        {"learner": {"algorithm": "scripted", "script": "a:b"}, "agents": {"agent_1": {"algorithm": "dqn"}}}
    )
    assert config.learning_agents == ("agent_1",)
    assert [config.learns(agent) for agent in ("agent_0", "agent_1")] == [False, True]
    assert config.learner_for("agent_0").script == "a:b"


@pytest.mark.parametrize(
    "values",
    [
        {"learner": {"algorithm": "random"}},
        {
            "world": {"agents": 2},
            "agents": {"agent_0": {"algorithm": "random"}, "agent_1": {"algorithm": "scripted"}},
        },
    ],
)
def test_run_in_which_nobody_learns_is_refused(values: dict[str, Any]) -> None:
    """There would be nothing to train."""
    with pytest.raises(ConfigError, match="nobody learns: every agent is random or scripted"):
        build_config(values)


def test_script_of_an_agent_that_is_not_scripted_is_refused() -> None:
    """Whoever writes a script wants it followed."""
    with pytest.raises(ConfigError, match=r"agents\.agent_1\.script is set, but its algorithm is 'dqn'"):
        build_config({"agents": {"agent_1": {"script": "a:b"}}})


def test_placement_of_an_agent_without_a_buffer_is_refused() -> None:
    """Nothing of it is stored anywhere."""
    with pytest.raises(ConfigError, match=r"replay\.placement\.agent_1: agent_1 is random"):
        build_config(
            {"agents": {"agent_1": {"algorithm": "random"}}, "replay": {"placement": {"agent_1": 0}}}
        )
