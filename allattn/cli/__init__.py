"""The `allattn` command. Heavy imports wait until a command needs them.

Exit status: 0 done, 1 the run failed, 2 wrong usage or config, 75 stopped by SIGTERM and saved.
Results go to stdout (with --json one object and nothing else), everything else to stderr. A user's
error is one line, and with --debug its traceback above it; a mistake of ours always has one.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from allattn.cli.arguments import build_parser
from allattn.config import ArgumentError, ConfigError, UnavailableError


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The arguments after `allattn`; None takes those of this process.

    Returns:
        The exit status.
    """
    parser = build_parser()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in argv  # before the command or after it
    # the DeepSpeed launcher puts --local_rank=N first; the rank is in the environment too
    argv = [a for a in argv if a != "--debug" and not a.startswith("--local_rank")]
    args, extra = parser.parse_known_args(argv)
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        _take_overrides(args, extra)
        status: int | None = args.run(args)
        return status or 0
    except KeyboardInterrupt:
        way_on = "; --resume continues from the newest checkpoint"
        print(f"allattn: interrupted{way_on if args.command == 'train' else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        failed = _status(error)
        if failed is None:
            print(
                "allattn: this is a mistake in allattn or in a library that it uses; please report "
                "it with the lines below and those of allattn --version",
                file=sys.stderr,
            )
            raise
        if debug:
            traceback.print_exception(error)
        return _fail(error, failed)


def _status(error: Exception) -> int | None:
    """The exit status of an error that was meant for the user; None: it was not."""
    if isinstance(error, ConfigError):
        return 1 if isinstance(error, UnavailableError) else 2
    if _is_memory(error):
        return 1
    if isinstance(error, ValueError | OSError | RuntimeError):
        if type(error).__name__ == "Stopped":
            return 75  # EX_TEMPFAIL: try again, with --resume
        return 1 if _is_ours(error) else None
    return None


def _take_overrides(args: argparse.Namespace, extra: list[str]) -> None:
    """argparse leaves overrides after an option (`train C --resume a=1`) over: take those too."""
    wrong = [
        e for e in extra if not hasattr(args, "overrides") or e.startswith("-") or "=" not in e
    ]
    if wrong:
        raise ConfigError(
            f"{args.command}: unknown argument {wrong[0]} (see allattn {args.command} -h)"
        )
    if extra:
        args.overrides = [*args.overrides, *extra]


def _fail(error: Exception, status: int) -> int:
    text = str(error)
    if isinstance(error, ArgumentError):
        text = error.spelt(lambda name: f"--{name.replace('_', '-')}")
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    if _is_memory(error):
        text = f"out of memory: use a smaller batch or segment ({text or 'no more is known'})"
    text = " ".join(text.split()) or type(error).__name__
    print(f"allattn: error: {text}", file=sys.stderr)
    return status


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out; torch has an error of its own, which must not be imported here."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _is_ours(error: Exception) -> bool:
    """Whether an error was meant for the user: raised by this package, or about a file."""
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("allattn")
