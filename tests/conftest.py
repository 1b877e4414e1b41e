"""What all tests may use; pytest takes plugins only from the topmost conftest."""

pytest_plugins = ["rookery.testing.plugin"]
