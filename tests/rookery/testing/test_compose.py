"""What a compose file becomes for a stack of its own."""

from __future__ import annotations

import copy
from typing import Any

from rookery.testing.compose import OWNER_LABEL, Compose, made_own

READ: dict[str, Any] = {
    "services": {
        "web": {
            "image": "web",
            "container_name": "the-web",
            "labels": {"of": "the file"},
            "environment": {"KEPT": "1", "CHANGED": "2"},
            "ports": [{"target": 80, "published": "8080", "host_ip": "127.0.0.1"}],
            "scale": 3,
        },
        "bare": {"image": "bare", "environment": None},
    },
    "networks": {"default": {"name": "the-network"}, "given": {"name": "given", "external": True}},
    "volumes": {"data": {"name": "the-data"}},
}


def test_own_spec_has_no_name_and_no_port_that_another_could_have() -> None:
    """What is external belongs to somebody else and is left alone; so is what was read."""
    before = copy.deepcopy(READ)
    own = made_own(READ, "mine", "me", {})
    assert before == READ
    assert "container_name" not in own["services"]["web"]
    assert own["services"]["web"]["ports"] == [{"target": 80, "host_ip": "127.0.0.1"}]
    assert own["networks"]["default"]["name"] == "mine_default"
    assert own["networks"]["given"] == {"name": "given", "external": True}
    assert own["volumes"]["data"]["name"] == "mine_data"


def test_own_spec_labels_everything_that_is_created() -> None:
    """Whatever has no label is found by nobody when its owner has died."""
    own = made_own(READ, "mine", "me", {})
    assert own["services"]["web"]["labels"] == {"of": "the file", OWNER_LABEL: "me"}
    for thing in (own["services"]["bare"], own["networks"]["default"], own["volumes"]["data"]):
        assert thing["labels"] == {OWNER_LABEL: "me"}


def test_environment_goes_over_that_of_the_file_and_is_taken_literally() -> None:
    """Compose reads the spec once more; a dollar must come through."""
    own = made_own(READ, "mine", "me", {"CHANGED": "a$b", "NEW": "x"})
    assert own["services"]["web"]["environment"] == {"KEPT": "1", "CHANGED": "a$$b", "NEW": "x"}
    assert own["services"]["bare"]["environment"] == {"CHANGED": "a$$b", "NEW": "x"}


def test_scale_replaces_what_the_file_says() -> None:
    """Two numbers that differ would be refused by Compose."""
    own = made_own(READ, "mine", "me", {})
    Compose("mine", own, []).set_scale("web", 5)
    assert "scale" not in own["services"]["web"]
    assert own["services"]["web"]["deploy"] == {"replicas": 5}
