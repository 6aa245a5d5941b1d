"""Makes the script that lets a shell complete commands, options and names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from allattn.config import ArgumentError
from allattn.config.shipped import shipped_configs

SHELLS = ("bash", "zsh", "tcsh")
_FILES = {"source", "train", "valid", "test", "tokenizer_from", "text", "conllu"}
_FOLDERS = {"out", "data", "path", "paths"}
_CONFIGS = {"config", "name"}


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Make the script for a shell.

    Args:
        parser: All commands and their options.
        shell: One of SHELLS.

    Raises:
        RuntimeError: What writes the scripts is not installed.
    """
    if shell not in SHELLS:
        raise ArgumentError("shell", f"bash, zsh or tcsh is needed, not {shell!r}")
    try:
        import shtab
    except ImportError:
        raise RuntimeError(
            "completion needs shtab, which is not installed; pip install 'allattn[completion]'"
        ) from None
    names = " ".join(shipped_configs())
    # a config is a name, completed from those that ship now, or a file
    config = {
        "bash": "_allattn_config",
        "zsh": f"{{compadd -- {names}; _files}}" if names else "_files",
        "tcsh": "f",
    }
    preamble: Any = {  # by shell, which its annotation does not say
        "bash": f'_allattn_config() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}'
    }
    for action in _actions(parser):
        if action.dest in _CONFIGS:
            action.complete = config  # type: ignore[attr-defined]  # where shtab looks for it
        elif action.dest in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # as above
        elif action.dest in _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # as above
    script: str = shtab.complete(parser, shell, preamble=preamble.get(shell, ""))
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every option and argument of every command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
