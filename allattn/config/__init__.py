"""The configuration of a run: dataclasses, loading, `key=value` overrides, validation.

A config file is YAML; every section is a dataclass of `schema.py`, so a misspelt key or a wrong
type fails at once, with one line that names the key (`overrides.py`), and so does a value that
cannot be used (`checks.py`). `load_config` returns a plain, validated `Config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from allattn.config.checks import CHOICES, check_model, validate
from allattn.config.overrides import (
    apply_override,
    apply_value,
    one_line,
    reject_unknown_keys,
)
from allattn.config.schema import (
    ArgumentError,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrepareConfig,
    RunConfig,
    TrainConfig,
    UnavailableError,
)
from allattn.config.shipped import find_config
from allattn.config.stages import DistillConfig, LrConfig, PruneConfig, StageConfig

__all__ = [
    "CHOICES",
    "ArgumentError",
    "Config",
    "ConfigError",
    "DataConfig",
    "DistillConfig",
    "LrConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PrepareConfig",
    "PruneConfig",
    "RunConfig",
    "StageConfig",
    "TrainConfig",
    "UnavailableError",
    "load_config",
    "model_config_from_dict",
    "save_config",
    "to_yaml",
    "validate",
    "with_vocabulary",
]


def load_config(path: str | Path, overrides: Sequence[str] | Mapping[str, Any] = ()) -> Config:
    """Read, override and validate a config.

    Args:
        path: A YAML file, or the name of a config that ships with allattn, such as `tiny`. A file
            that exists wins over a name.
        overrides: `key=value` strings as on the command line, or a dict from keys to values.
            Keys may index lists: `stages[1].prune.keep`.

    Returns:
        The config, complete and checked.

    Raises:
        ConfigError: A file, key, type or value cannot be used; the message is one line.
    """
    path = find_config(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; a config is a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 at byte {error.start}; a config is a YAML file in UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as a config ({error})") from None
    try:
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(raw, dict):
        sections = ", ".join(field.name for field in dataclasses.fields(Config))
        raise ConfigError(f"{path}: a config is a mapping with sections {sections}")
    reject_unknown_keys(raw, Config, "", str(path))
    try:
        config = OmegaConf.merge(OmegaConf.structured(Config), raw)
        if isinstance(overrides, Mapping):
            for key, value in overrides.items():
                config = apply_value(config, key, value)
        else:
            for override in [overrides] if isinstance(overrides, str) else overrides:
                if not isinstance(override, str):
                    raise ConfigError(f"override {override!r}: write 'key=value'")
                config = apply_override(config, override)
        result = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    assert isinstance(result, Config), "a structured config becomes its class"
    validate(result)
    return result


def save_config(config: Config, path: str | Path) -> None:
    """Write a config, with every key resolved, as a YAML file that `load_config` reads.

    Args:
        config: What to write.
        path: The file; one that exists is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    Path(path).write_text(to_yaml(config), encoding="utf-8")


def to_yaml(config: Config) -> str:
    """Turn a config, with every key resolved, into YAML text.

    Args:
        config: What to write.

    Returns:
        The text of a config file.

    Raises:
        ConfigError: A value has a type that its key does not take.
    """
    try:
        return OmegaConf.to_yaml(OmegaConf.structured(config))
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None


def model_config_from_dict(values: dict[str, Any], where: str) -> ModelConfig:
    """A `ModelConfig` from the `model` part of an export or a checkpoint; errors name `where`."""
    reject_unknown_keys(values, ModelConfig, "model", where)
    try:
        model = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), values))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{where}: {one_line(error)}") from None
    assert isinstance(model, ModelConfig), "a structured config becomes its class"
    check_model(model)
    return model


def with_vocabulary(model: ModelConfig, vocab_size: int, where: Any) -> ModelConfig:
    """The model for a corpus's vocabulary.

    Raises:
        ConfigError: the config asks for another one, or has cutoffs beyond it.
    """
    if model.vocab_size not in (None, vocab_size):
        raise ConfigError(
            f"model.vocab_size: {model.vocab_size}, but {where} has {vocab_size} tokens; "
            "leave it out, or prepare the data anew"
        )
    model = dataclasses.replace(model, vocab_size=vocab_size)
    check_model(model)
    return model
