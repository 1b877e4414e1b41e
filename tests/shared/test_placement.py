from __future__ import annotations

from typing import Any

import pytest

from shared.config import Config, build_config, merged
from shared.errors import ConfigError
from shared.placement import replay_of


def make_config(services: int, placement: dict[str, int] | None = None, agents: int = 5) -> Config:
    """As the launcher writes it: one entry in endpoints.replay for each service."""
    return build_config(
        {
            "world": {"agents": agents},
            "replay": {"services": services, "placement": placement or {}},
            "endpoints": {"replay": [endpoints(number) for number in range(services)]},
        }
    )


def endpoints(number: int) -> dict[str, Any]:
    return {"segments": f"tcp://127.0.0.1:{6000 + number}", "requests": f"tcp://127.0.0.1:{7000 + number}"}


def homes(config: Config) -> list[int]:
    """The services of agent_0, agent_1, ..."""
    agents = [f"agent_{number}" for number in range(config.world.agents)]
    return [replay_of(config, agents, agent) for agent in agents]


def test_agents_without_a_placement_take_turns() -> None:
    """In the order of their names, over all services."""
    assert homes(make_config(1)) == [0, 0, 0, 0, 0]
    assert homes(make_config(2)) == [0, 1, 0, 1, 0]
    assert homes(make_config(3)) == [0, 1, 2, 0, 1]


def test_agents_in_any_order_are_kept_at_the_same_place() -> None:
    """Actors, learners and replay list the agents each in their own order and must agree."""
    config = make_config(3, {"agent_3": 0})
    agents = [f"agent_{number}" for number in range(5)]
    for agent in agents:
        assert replay_of(config, reversed(agents), agent) == replay_of(config, agents, agent)


def test_more_than_ten_agents_take_turns_in_the_order_of_their_names_as_text() -> None:
    """agent_10 comes before agent_2: names are texts, whatever they end with."""
    assert homes(make_config(2, agents=11)) == [0, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0]


def test_agents_with_a_placement_are_where_it_says() -> None:
    """The map decides, even if it leaves a service without agents."""
    everyone = {f"agent_{number}": home for number, home in enumerate([1, 1, 0, 1, 1])}
    assert homes(make_config(2, everyone)) == [1, 1, 0, 1, 1]
    assert homes(make_config(2, dict.fromkeys(everyone, 1))) == [1, 1, 1, 1, 1]


def test_agents_that_the_placement_leaves_out_take_turns_among_themselves() -> None:
    """The first of them goes to service 0, whoever was put there by name."""
    assert homes(make_config(2, {"agent_0": 1})) == [1, 0, 1, 0, 1]
    assert homes(make_config(3, {"agent_0": 0, "agent_2": 0})) == [0, 0, 0, 1, 2]


def test_agents_that_learn_nothing_take_no_turn_and_are_kept_nowhere() -> None:
    """The turn of a random or scripted agent goes to the next one that learns."""
    config = make_config(2)
    config = build_config(
        merged(
            config.model_dump(mode="json"),
            {"agents": {"agent_0": {"algorithm": "random"}, "agent_2": {"algorithm": "scripted"}}},
        )
    )
    agents = [f"agent_{number}" for number in range(5)]
    assert {agent: replay_of(config, agents, agent) for agent in config.learning_agents} == {
        "agent_1": 0,
        "agent_3": 1,
        "agent_4": 0,
    }
    with pytest.raises(ConfigError, match="agent_2 is scripted: no replay service keeps it"):
        replay_of(config, agents, "agent_2")


@pytest.mark.parametrize(("services", "listed"), [(2, 1), (1, 2), (3, 2)])
def test_services_that_endpoints_do_not_list_are_refused_with_both_numbers(
    services: int, listed: int
) -> None:
    """Whoever starts services by hand is told, rather than given an agent that nobody keeps."""
    entries = [endpoints(number) for number in range(listed)]
    config = build_config({"replay": {"services": services}, "endpoints": {"replay": entries}})
    with pytest.raises(
        ConfigError, match=rf"replay\.services = {services}, but endpoints\.replay lists {listed}"
    ):
        replay_of(config, ["agent_0"], "agent_0")
