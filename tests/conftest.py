"""What all tests may use; pytest takes plugins only from the topmost conftest."""

import signal

pytest_plugins = ["rookery.testing.plugin"]


def pytest_configure() -> None:
    """A shell starts what runs in its background deaf to Ctrl-C, and so would be all that tests interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
