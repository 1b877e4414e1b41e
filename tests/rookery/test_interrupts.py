"""Ctrl-C: noted once, obeyed at once the second time."""

import os
import signal

import pytest

from rookery.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_interrupt_is_noted_and_the_second_ends_at_once(number: signal.Signals) -> None:
    """Work goes on after the first; what is said of it is said once."""
    said: list[str] = []
    with Interrupts(lambda: said.append("ending")) as interrupts:
        os.kill(os.getpid(), number)
        assert (interrupts.count, said) == (1, ["ending"])
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert said == ["ending"]


def test_handlers_from_before_are_back_afterwards() -> None:
    """Whatever happens inside."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ValueError, match="inside"), Interrupts(lambda: None):
        raise ValueError("inside")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
