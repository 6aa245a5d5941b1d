"""`key=value` overrides, and keys or types that no section has: refused before OmegaConf does."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import PurePath
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from allattn.config.schema import (
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    PrepareConfig,
    RunConfig,
    TrainConfig,
)
from allattn.config.stages import DistillConfig, LrConfig, PruneConfig, StageConfig


def apply_override(config: Any, override: str) -> Any:
    """Apply one `key=value` to an OmegaConf config; returns it.

    Raises:
        ConfigError: not of that form, or no such key, index or type.
    """
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write key=value")
    parts = _parts(key)
    _check_path(config, parts, key)
    section = _section(parts[:-1])
    is_text = dataclasses.is_dataclass(section) and "str" in _field_type(section, parts[-1])
    is_text = is_text and text != "null" and text[:1] not in ("", "'", '"', "[", "{")
    try:
        # a name stays as it is written, also where YAML would read a number or a date
        value = text if is_text else yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"override {override!r}: {text!r} is not a YAML value") from None
    if isinstance(value, str) and not is_text:
        value = _number(value)
    return _set(config, key, value, override)


def apply_value(config: Any, key: str, value: Any) -> Any:
    """Set one key of an OmegaConf config to a Python value; returns the config.

    Raises:
        ConfigError: no such key or index, or a value of another type.
    """
    if not isinstance(key, str) or not key:
        raise ConfigError(f"override {key!r}: a key such as 'model.n_layers' is needed")
    value = str(value) if isinstance(value, PurePath) else value
    value = list(value) if isinstance(value, tuple) else value
    _check_path(config, _parts(key), key)
    return _set(config, key, value, f"{key}={value}")


def _parts(key: str) -> list[str]:
    return key.replace("[", ".[").split(".")


def _set(config: Any, key: str, value: Any, override: str) -> Any:
    """Set a key that exists; `override` is what the user wrote, for the message."""
    parts = _parts(key)
    section, parent = _section(parts[:-1]), key.rpartition(".")[0]
    try:
        _make_section(config, parent, section)
        if isinstance(value, dict):
            _make_section(config, key, _section(parts))
        if isinstance(value, dict | list):
            if parts[-1].startswith("["):
                reject_unknown_keys(value, section, key, "override")
            else:
                reject_unknown_keys({parts[-1]: value}, section, parent, "override")
        OmegaConf.update(config, key, value, merge=True)
    except ConfigError:
        raise
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        raise ConfigError(f"override {override!r}: {one_line(error)}") from None
    return config


def _make_section(config: Any, path: str, section: Any) -> None:
    """Give an optional section that is absent so far, such as stages[0].prune, its defaults.

    OmegaConf merges into an absent section by itself only since 2.4.
    """
    optional = isinstance(section, type) and dataclasses.is_dataclass(section)
    if path and optional and OmegaConf.select(config, path) is None:
        OmegaConf.update(config, path, section())


def _check_path(config: Any, parts: list[str], key: str) -> None:
    """Refuse an unknown key or a list index out of range before OmegaConf does, in our words."""
    node: Any = config
    for depth, part in enumerate(parts):
        here = ".".join(parts[:depth]).replace(".[", "[")
        if part.startswith("["):
            index = part[1:-1]
            if not part.endswith("]") or not index.isdigit():
                raise ConfigError(f"override {key!r}: {part} is not a list index")
            if not OmegaConf.is_list(node):
                raise ConfigError(f"override {key!r}: {here} is not a list")
            if int(index) >= len(node):
                last = f", the last is {here}[{len(node) - 1}]" if len(node) else ""
                raise ConfigError(f"override {key!r}: {here} has {len(node)} entries{last}")
            node = node[int(index)]
        else:
            if OmegaConf.is_list(node):
                right = f"{here}[{part}]" if part.isdigit() else f"{here}[0].{part}"
                raise ConfigError(f"override {key!r}: {here} is a list; write {right}")
            section = _section(parts[:depth])
            if section is None:  # inside a free mapping
                return
            if not dataclasses.is_dataclass(section):
                raise ConfigError(f"override {key!r}: {here} has no keys inside")
            if part not in _names(section):
                raise ConfigError(f"override: {_unknown(part, section, here)}")
            node = node[part] if OmegaConf.is_dict(node) else None


def _section(parts: list[str]) -> type[Any] | None:
    """The dataclass at a path (stages, [0], prune: PruneConfig), or None in a free mapping."""
    section: type[Any] | None = Config
    for part in parts:
        if part.startswith("["):
            continue
        if section is None:
            return None
        section = _children(section).get(part, str)
    return section


def _field_type(section: Any, name: str) -> str:
    """A field's annotation, as written."""
    return next(str(f.type) for f in dataclasses.fields(section) if f.name == name)


def _names(section: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(section)]


_CHILDREN: dict[Any, dict[str, Any]] = {
    Config: {
        "run": RunConfig, "data": DataConfig, "model": ModelConfig, "train": TrainConfig,
        "stages": StageConfig, "deepspeed": None,
    },
    DataConfig: {"prepare": PrepareConfig},
    TrainConfig: {"optimizer": OptimizerConfig},
    StageConfig: {"lr": LrConfig, "prune": PruneConfig, "distill": DistillConfig},
    PruneConfig: {"remove": None},
}  # fmt: skip


def _children(section: Any) -> dict[str, Any]:
    return _CHILDREN.get(section, {})


def reject_unknown_keys(raw: Any, section: Any, where: str, source: str) -> None:
    """Also refuses a scalar or a list where a section belongs, and the reverse."""
    if not dataclasses.is_dataclass(section):
        return
    if not isinstance(raw, dict):
        raise ConfigError(f"{source}: {where}: a mapping is needed, not {raw!r}")
    for key, value in raw.items():
        if key not in _names(section):
            raise ConfigError(f"{source}: {_unknown(str(key), section, where)}")
        path = f"{where}.{key}" if where else str(key)
        child = _children(section).get(key)
        kind = _field_type(section, key)
        if kind.startswith("list"):
            if not isinstance(value, list):
                raise ConfigError(f"{source}: {path}: a list is needed, not {value!r}")
            for i, item in enumerate(value):
                reject_unknown_keys(item, child, f"{path}[{i}]", source)
        elif dataclasses.is_dataclass(child):
            if value is not None or "None" not in kind:
                reject_unknown_keys(value, child, path, source)
        elif isinstance(value, list | dict) and not kind.startswith(("Any", "dict")):
            raise ConfigError(f"{source}: {path}: one value is needed, not {value!r}")


def _unknown(key: str, section: Any, where: str) -> str:
    near = difflib.get_close_matches(key, _names(section), 1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_names(section))}"
    return f"unknown key {f'{where}.{key}' if where else key}; {hint}"


def _number(text: str) -> float | str:
    """YAML 1.1 reads 5e-4 as text; people mean a number."""
    try:
        return float(text) if text.strip()[:1] in "+-.0123456789" and text.strip() else text
    except ValueError:
        return text


def one_line(error: Exception) -> str:
    """The key and the first line of an OmegaConf error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    key = getattr(error, "full_key", None)
    return f"{key}: {lines[0]}" if key else lines[0]
