from __future__ import annotations

from pathlib import Path

import pydantic
import pytest

from services.param_server.spec_book import SpecBook
from shared.errors import BrokenInvariant, Refused
from shared.specs import AgentSpec, Continuous, Discrete, vector_observation


def spec(size: int = 4, n: int = 3, **more: object) -> AgentSpec:
    return AgentSpec.model_validate(
        {"observation": vector_observation(size), "discrete": Discrete(n=n)} | more
    )


def test_registration_first_is_stored_and_survives_a_restart(tmp_path: Path) -> None:
    """The first actor's specs are the run's."""
    book = SpecBook(tmp_path / "specs.json")
    assert book.specs == {}
    assert book.register({"a": spec(), "b": spec(5)})
    assert SpecBook(tmp_path / "specs.json").specs == book.specs == {"a": spec(), "b": spec(5)}


def test_registration_identical_is_accepted_without_a_change(tmp_path: Path) -> None:
    """Every actor registers; only the first one's counts."""
    SpecBook(tmp_path / "specs.json").register({"a": spec(), "b": spec(5)})
    assert not SpecBook(tmp_path / "specs.json").register({"b": spec(5), "a": spec()})


@pytest.mark.parametrize(
    ("continuous", "shape"),
    [("-Infinity", "4"), ("NaN", "4"), ("-1.0", "-9")],
    ids=["a bound that is infinite", "a bound that is no number", "a negative side"],
)
def test_specs_that_could_not_be_read_again_are_no_specs(continuous: str, shape: str) -> None:
    """JSON has no word for infinity: such a book would never open again."""
    observation = f'{{"name": "observation", "dtype": "float32", "shape": [{shape}], "per": "observation"}}'
    text = f'{{"observation": {observation}, "continuous": {{"size": 1, "low": {continuous}}}}}'
    with pytest.raises(pydantic.ValidationError):
        AgentSpec.model_validate_json(text)
    assert AgentSpec.model_validate_json(text.replace(continuous, "-2.0").replace("-9", "4"))


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        (spec(size=6), r"agent 'a', observation\.shape: \[6\] where \[4\] is registered"),
        (spec(n=9), r"agent 'a', discrete\.n: 9 where 3 is registered"),
        (spec(stack=2), "agent 'a', stack: 2 where 1 is registered"),
        (spec(continuous=Continuous(size=2)), r"agent 'a', continuous: \{.*'size': 2.*\} where None is"),
    ],
)
def test_registration_that_differs_is_refused_by_name(tmp_path: Path, offered: AgentSpec, words: str) -> None:
    """The reason names the agent, the field and both values; nothing changes."""
    book = SpecBook(tmp_path / "specs.json")
    book.register({"a": spec()})
    with pytest.raises(Refused, match=words) as caught:
        book.register({"a": offered})
    assert caught.value.code == "spec_mismatch"
    assert book.specs == {"a": spec()}


def test_registration_of_other_agents_is_refused_with_their_names(tmp_path: Path) -> None:
    """Missing and unknown agents are both named."""
    book = SpecBook(tmp_path / "specs.json")
    book.register({"a": spec(), "b": spec()})
    with pytest.raises(Refused, match=r"\['b'\] missing, \['c'\] not known"):
        book.register({"a": spec(), "c": spec()})
    with pytest.raises(Refused, match="without agents"):
        book.register({})


def test_book_with_a_damaged_file_does_not_open(tmp_path: Path) -> None:
    """Specs decide how everything is read: no guessing."""
    path = tmp_path / "specs.json"
    SpecBook(path).register({"a": spec()})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BrokenInvariant, match="remove it"):
        SpecBook(path)
