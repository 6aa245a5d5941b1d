"""The `allattn` command. Heavy imports wait until a command needs them.

Exit status: 0 done, 1 the run failed, 2 wrong usage or config, 75 stopped by SIGTERM and saved.
Results go to stdout (with --json one object and nothing else), everything else to stderr. A user's
error is one line.
"""

from __future__ import annotations

import argparse
import sys

from allattn.cli.arguments import build_parser
from allattn.config import ConfigError


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    parser = build_parser()
    argv = sys.argv[1:] if argv is None else argv
    # the DeepSpeed launcher puts --local_rank=N first; the rank is in the environment too
    args, extra = parser.parse_known_args([a for a in argv if not a.startswith("--local_rank")])
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        _take_overrides(args, extra)
        args.run(args)
    except ConfigError as error:
        return _fail(error, 2)
    except (ValueError, OSError, RuntimeError) as error:
        if type(error).__name__ == "Stopped":
            return _fail(error, 75)  # EX_TEMPFAIL: try again, with --resume
        if not _is_ours(error):
            raise
        return _fail(error, 1)
    except KeyboardInterrupt:
        print("allattn: interrupted", file=sys.stderr)
        return 130
    return 0


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
    if isinstance(error, OSError) and error.filename:
        text = f"{error.filename}: {error.strerror}"
    text = " ".join(text.split()) or type(error).__name__
    print(f"allattn: error: {text}", file=sys.stderr)
    return status


def _is_ours(error: Exception) -> bool:
    """Whether an error was meant for the user: raised by this package, or about a file."""
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("allattn")
