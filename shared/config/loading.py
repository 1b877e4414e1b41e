"""From a YAML file, the environment and flags to one validated config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic
import yaml

from shared.config.explain import explain, merged
from shared.config.model import Config
from shared.errors import ConfigError

ENVIRONMENT_PREFIX = "ROOKERY_"


def load_config(
    path: Path | None = None,
    settings: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The config from a file, the environment and `a.b=c` settings, or ConfigError in words."""
    data: dict[str, Any] = _read_yaml(path) if path else {}
    for path_in_config, value in _environment_settings(os.environ if environment is None else environment):
        data = merged(data, _nested(path_in_config, value))
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {setting!r}: write key=value, for example --set learner.batch_size=512")
        data = merged(data, _nested(key.strip().split("."), _scalar(text, f"--set {key}")))
    return build_config(data)


def build_config(data: Mapping[str, Any]) -> Config:
    """A validated config, or ConfigError that names each wrong key or value."""
    try:
        return Config.model_validate(data)
    except pydantic.ValidationError as error:
        raise ConfigError(explain(error, Config)) from None


def dump_config(config: Config) -> str:
    """The config as YAML, every value included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values at the top, found {type(data).__name__}")
    return data


def _environment_settings(environment: Mapping[str, str]) -> Iterable[tuple[list[str], Any]]:
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            path = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            yield path, _scalar(environment[name], name)


def _scalar(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{where}: {text!r} is not a YAML value") from None


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    assert isinstance(value, dict)
    return value
