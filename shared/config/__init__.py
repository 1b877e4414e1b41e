"""The one configuration of a run: what may be set, what it means, and what is allowed.

Read once, in this order, later ones winning: the defaults in `sections.py` and `learner.py`, a YAML file,
environment variables (`ROOKERY_LEARNER__BATCH_SIZE=512`), flags (`--set learner.batch_size=512`). A key that
does not exist is refused with its name and the nearest one that does. Nothing else in Rookery reads the
environment.
"""

from shared.config.explain import known_keys, merged
from shared.config.learner import (
    HybridConfig,
    IQNConfig,
    LearnerConfig,
    NetworkConfig,
    PriorityConfig,
    TargetConfig,
)
from shared.config.loading import build_config, dump_config, load_config
from shared.config.model import Config
from shared.config.sections import (
    ActorConfig,
    Endpoints,
    EpsilonConfig,
    LimitsConfig,
    Mode,
    NoiseConfig,
    ParallelConfig,
    ParamServerConfig,
    ReplayConfig,
    ReplayEndpoints,
    RunConfig,
    Section,
    WorldConfig,
)

__all__ = [
    "ActorConfig",
    "Config",
    "Endpoints",
    "EpsilonConfig",
    "HybridConfig",
    "IQNConfig",
    "LearnerConfig",
    "LimitsConfig",
    "Mode",
    "NetworkConfig",
    "NoiseConfig",
    "ParallelConfig",
    "ParamServerConfig",
    "PriorityConfig",
    "ReplayConfig",
    "ReplayEndpoints",
    "RunConfig",
    "Section",
    "TargetConfig",
    "WorldConfig",
    "build_config",
    "dump_config",
    "known_keys",
    "load_config",
    "merged",
]
