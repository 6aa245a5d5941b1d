"""Try the installation where people have trouble with it, and say what each try did.

    python tools/try_install.py             all of it: about 15 minutes
    python tools/try_install.py --list      the names of the tries
    python tools/try_install.py NAME ...    some of them

Each try copies the files that git tracks to a scratch folder and runs what a user would run there.
The first one installs an environment, which the others use. Tries without a network, without room
or without permission run in a name space of their own (`unshare`, on Linux). Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHORT = ["stages[0].steps=4", "stages[1].steps=4", "stages[2].steps=2", "train.eval_every=100"]
TRIES: dict[str, Callable[[Path], str]] = {}


class Failed(Exception):
    """A try that did not end as it should; the message says how it ended."""


def a_try(function: Callable[[Path], str]) -> Callable[[Path], str]:
    """Register a try under its function's name."""
    TRIES[function.__name__] = function
    return function


def copy_checkout(to: Path) -> Path:
    """The files that git tracks or would track, copied to a folder that does not exist yet."""
    shown = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    )  # fmt: skip
    for name in filter(None, shown.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def run(
    command: list[str], cwd: Path, status: int | None = 0, env: dict[str, str] | None = None
) -> str:
    """Run a command and return all that it said; `env` as it is, or this process's.

    Raises:
        Failed: another exit status than `status` (None: anything but 0).
    """
    done = subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    right = done.returncode != 0 if status is None else done.returncode == status
    if not right:
        raise Failed(f"{' '.join(command)}: exit status {done.returncode}:\n{done.stdout[-3000:]}")
    return done.stdout


def one_line(said: str, *words: str) -> str:
    """The last line of a refusal, which has to be run.sh's own and hold these words."""
    lines = said.strip().splitlines()
    if not lines[-1].startswith("run.sh: ") or not all(word in lines[-1] for word in words):
        raise Failed(f"expected one line of run.sh with {words}:\n{said[-2000:]}")
    if "Traceback" in said:
        raise Failed(f"a traceback:\n{said[-2000:]}")
    return lines[-1]


def apart(*commands: str, network: bool = True) -> list[str]:
    """A shell command line in a mount name space of its own, and a network one unless `network`."""
    if shutil.which("unshare") is None:
        raise Failed("unshare is not on the PATH (it is part of util-linux)")
    return ["unshare", "-rm" if network else "-rmn", "bash", "-euc", "\n".join(commands)]


def base(scratch: Path) -> Path:
    """A checkout with its environment, in a path with spaces and letters outside ASCII."""
    folder = scratch / "a path with späces" / "allattn größe"
    if not folder.exists():
        copy_checkout(folder)
        started = time.monotonic()
        run(["./run.sh", "setup"], folder)
        size = sum(f.stat().st_size for f in (folder / ".venv").rglob("*") if f.is_file())
        took = time.monotonic() - started
        print(f"  installed {size / 1e9:.1f} GB in {took:.0f} s", flush=True)
    return folder


def train(folder: Path, name: str, script: str = "./run.sh", **options: object) -> str:
    """A run of ten steps; returns what it said."""
    command = [script, "train", "tiny", f"run.name={name}", *SHORT]
    return run(command, Path(str(options.pop("cwd", folder))), **options)  # type: ignore[arg-type]


@a_try
def spaces_and_letters(scratch: Path) -> str:
    """The checkout lies in a path with spaces and letters outside ASCII."""
    folder = base(scratch)
    train(folder, "spaces")
    run(["./run.sh", "evaluate", "runs/spaces", "--json"], folder)
    return "trained and evaluated"


@a_try
def another_directory(scratch: Path) -> str:
    """run.sh is called from another folder: what it makes lies there."""
    elsewhere = scratch / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    train(base(scratch), "away", str(base(scratch) / "run.sh"), cwd=elsewhere)
    if not (elsewhere / "runs" / "away" / "final").is_dir():
        raise Failed("no runs/away/final in the folder that it was called from")
    return f"runs/away is in {elsewhere.name}/"


@a_try
def through_a_symlink(scratch: Path) -> str:
    """run.sh is called by a link to it, and through a link to the checkout."""
    folder, links = base(scratch), scratch / "links"
    links.mkdir(exist_ok=True)
    for name, target in (("allattn.sh", folder / "run.sh"), ("checkout", folder)):
        (links / name).unlink(missing_ok=True)
        (links / name).symlink_to(target)
    by_file = run([str(links / "allattn.sh"), "--version"], links)
    by_folder = run([str(links / "checkout" / "run.sh"), "--version"], links)
    if by_file != by_folder or "installing" in by_file:
        raise Failed(f"{by_file}\n{by_folder}")
    return by_file.splitlines()[0]


@a_try
def no_home(scratch: Path) -> str:
    """HOME is not set."""
    env = {key: value for key, value in os.environ.items() if key != "HOME"}
    train(base(scratch), "homeless", env=env)
    return "trained"


@a_try
def no_compiler(scratch: Path) -> str:
    """No C++ compiler is on the PATH, and no kernel has been compiled before."""
    folder = base(scratch)
    cache = scratch / "empty cache"
    cache.mkdir(exist_ok=True)
    env = {**os.environ, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(cache)}
    said = train(folder, "uncompiled", env=env)
    (line,) = [x for x in said.splitlines() if "no C++ compiler" in x]
    return line.strip()


@a_try
def no_network(scratch: Path) -> str:
    """After the install nothing needs a network: the whole demo, shortened."""
    folder = base(scratch)
    run(apart("./run.sh setup", "./run.sh prepare --dataset tiny --tokenizer byte --out data/off",
              "./run.sh train tiny run.name=off " + " ".join(f"'{x}'" for x in SHORT),
              "./run.sh evaluate runs/off", "./run.sh export runs/off --out exports/off",
              "./run.sh generate exports/off --prompt 'Anne ' --max-new-tokens 5",
              network=False), folder)  # fmt: skip
    return "set up, prepared, trained, evaluated, exported and generated"


@a_try
def read_only_wheel(scratch: Path) -> str:
    """A wheel is built from a source tree that cannot be written to."""
    folder, out = base(scratch), scratch / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    run(apart(f"mount --bind '{folder}' '{folder}'", f"mount -o remount,ro,bind '{folder}'",
              f"! touch '{folder}/x' 2>/dev/null",
              f"'{folder}/.venv/bin/python' -m pip wheel -q --no-deps -w '{out}' '{folder}'"),
        scratch)  # fmt: skip
    (wheel,) = out.glob("allattn-*.whl")
    return wheel.name


@a_try
def read_only_checkout(scratch: Path) -> str:
    """A checkout that cannot be written to and has no environment yet is refused in a line."""
    folder = copy_checkout(scratch / "read only")
    said = run(apart(f"mount --bind '{folder}' '{folder}'", f"mount -o remount,ro,bind '{folder}'",
                     f"cd '{folder}' && ./run.sh setup"), scratch, status=1)  # fmt: skip
    shutil.rmtree(folder)
    return one_line(said, "cannot be written to", "copy the checkout")


@a_try
def no_space(scratch: Path) -> str:
    """The disk is full while pip installs: said in one line."""
    folder = scratch / "no space"
    folder.mkdir()
    files = "git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t"
    said = run(apart(f"mount -t tmpfs -o size=150m none '{folder}'",
                     f"cd '{ROOT}' && {files} '{folder}'",
                     f"cd '{folder}' && ./run.sh setup"), scratch, status=1)  # fmt: skip
    shutil.rmtree(folder)
    return one_line(said, "no space left", "make room")


@a_try
def wrong_python(scratch: Path) -> str:
    """An older Python (PYTHON_TOO_OLD) is refused with its version; so is one that is not there."""
    folder = base(scratch)
    env = {**os.environ, "PYTHON": "no-such-python"}
    missing = one_line(run(["./run.sh", "setup"], folder, 2, env), "is not there")
    named = os.environ.get("PYTHON_TOO_OLD", "python3.9")
    old = shutil.which(named)
    if old is None or subprocess.run([old, "-c", ""], capture_output=True, check=False).returncode:
        return f"{missing}; {named} is not here (tests/test_packaging.py has a stand-in)"
    return one_line(run(["./run.sh", "setup"], folder, 2, {**os.environ, "PYTHON": old}), "3.10")


@a_try
def killed_install(scratch: Path) -> str:
    """An install that was killed in the middle is mended by the next start."""
    folder = copy_checkout(scratch / "killed")
    process = subprocess.Popen(
        ["./run.sh", "setup"], cwd=folder, start_new_session=True, stderr=subprocess.DEVNULL
    )
    packages = folder / ".venv" / "lib"
    while process.poll() is None and not list(packages.glob("python*/site-packages/numpy")):
        time.sleep(0.05)  # until pip has begun to write packages
    if process.poll() is not None:
        raise Failed("the install ended before it could be killed")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if (folder / ".venv" / ".installed").exists():
        raise Failed("a killed install counts as done")
    run(["./run.sh", "setup"], folder)
    said = run(["./run.sh", "--version"], folder)
    if "installing" in said:
        raise Failed("the second start did not finish the install")
    return f"killed while pip wrote packages, then mended: {said.splitlines()[0]}"


@a_try
def changed_constraints(scratch: Path) -> str:
    """After pyproject.toml or constraints.txt changed, the environment is brought up to date."""
    folder = base(scratch)
    constraints = folder / "constraints.txt"
    before = constraints.read_text(encoding="utf-8")
    constraints.write_text(before + "# changed\n", encoding="utf-8")
    said = run(["./run.sh", "--version"], folder)
    again = run(["./run.sh", "--version"], folder)
    if "installing" not in said or "installing" in again:
        raise Failed(f"{said}\n{again}")
    constraints.write_text(before, encoding="utf-8")
    run(["./run.sh", "setup"], folder)
    return "installed again once, then not"


@a_try
def two_at_once(scratch: Path) -> str:
    """Two first starts at the same time: one installs, the other waits and uses it."""
    folder = base(scratch)
    (folder / ".venv" / ".installed").unlink()
    both = [
        subprocess.Popen(["./run.sh", "--version"], cwd=folder, stdout=subprocess.PIPE,
                         stderr=subprocess.STDOUT, text=True) for _ in range(2)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in both]
    if any(process.returncode for process in both):
        raise Failed("\n".join(said))
    installs = sum("installing" in text for text in said)
    if installs != 1:
        raise Failed(f"{installs} installs:\n" + "\n".join(said))
    return "one installed, the other used it"


@a_try
def cpu_only(scratch: Path) -> str:
    """TORCH=cpu installs a build of PyTorch without CUDA, where pip's configuration has one."""
    folder = copy_checkout(scratch / "cpu")
    started = time.monotonic()
    run(["./run.sh", "setup"], folder, env={**os.environ, "TORCH": "cpu"})
    took = time.monotonic() - started
    code = "import torch; assert torch.version.cuda is None; print(torch.__version__)"
    version = run([".venv/bin/python", "-c", code], folder).strip()
    size = sum(f.stat().st_size for f in (folder / ".venv").rglob("*") if f.is_file())
    shutil.rmtree(folder)
    return f"PyTorch {version}; {size / 1e9:.1f} GB in {took:.0f} s"


def other_python(scratch: Path, name: str) -> str:
    """Install with another Python and train ten steps."""
    folder = copy_checkout(scratch / Path(name).name)
    env = {**os.environ, "PYTHON": name}
    run(["./run.sh", "setup"], folder, env=env)
    train(folder, "other", env=env)
    version = run([".venv/bin/python", "--version"], folder).strip()
    shutil.rmtree(folder)
    return f"{version}: installed and trained"


@a_try
def oldest_python(scratch: Path) -> str:
    """Python 3.10, or what PYTHON_OLDEST names."""
    return other_python(scratch, os.environ.get("PYTHON_OLDEST", "python3.10"))


@a_try
def newest_python(scratch: Path) -> str:
    """Python 3.13, or what PYTHON_NEWEST names."""
    return other_python(scratch, os.environ.get("PYTHON_NEWEST", "python3.13"))


def main() -> int:
    """Run the tries that were asked for; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="which tries (default: all)")
    parser.add_argument("--list", action="store_true", help="print their names and what they do")
    parser.add_argument("--scratch", metavar="DIR", help="where to (default: a temporary folder)")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in TRIES]
    if unknown:
        parser.error(f"no try named {unknown[0]}; known: {', '.join(TRIES)}")
    if args.list:
        for name, function in TRIES.items():
            print(f"{name:<22} {function.__doc__}")
        return 0
    failed = []
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="allattn-try-") as scratch:
        for name in args.names or TRIES:
            print(f"{name}: {TRIES[name].__doc__}", flush=True)
            try:
                print(f"  ok: {TRIES[name](Path(scratch))}", flush=True)
            except Failed as error:
                failed.append(name)
                print(f"  FAILED: {error}", flush=True)
    print(f"{len(args.names or TRIES) - len(failed)} ok, {len(failed)} failed {failed or ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
