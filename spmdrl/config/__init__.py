"""What a run is, and how it is read: `Config` and its parts, config files, flags, JSON."""

from spmdrl.config.reading import load, read_file, with_flags
from spmdrl.config.rules import ConfigError, suggest
from spmdrl.config.saved import changes, flatten, from_json, parse_json, to_json
from spmdrl.config.schema import (
    EXIT_BAD_INPUT,
    EXIT_FAULT,
    EXIT_STOPPED,
    AlgoConfig,
    CheckpointConfig,
    Config,
    EnvConfig,
    EvalConfig,
    LogConfig,
    NetConfig,
    OptimConfig,
    SyncConfig,
)

__all__ = [
    "EXIT_BAD_INPUT", "EXIT_FAULT", "EXIT_STOPPED", "AlgoConfig", "CheckpointConfig", "Config",
    "ConfigError", "EnvConfig", "EvalConfig", "LogConfig", "NetConfig", "OptimConfig",
    "SyncConfig", "changes", "flatten", "from_json", "load", "parse_json", "read_file",
    "suggest", "to_json", "with_flags",
]  # fmt: skip
