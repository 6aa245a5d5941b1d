#!/usr/bin/env bash
# The whole job on the corpus that ships with the package, or any part of it.
#
#   ./run.sh                 prepare, train (dense, prune, fine-tune), evaluate, export, generate
#   ./run.sh setup           only make .venv and install into it
#   ./run.sh test [ARGS]     the test suite; ARGS go to pytest (-m slow, a file, ...)
#   ./run.sh test --latest   the suite in .venv-latest, with the newest versions of everything
#   ./run.sh test --lowest   the suite in .venv-lowest, with the lowest versions of pyproject.toml
#   ./run.sh check           ruff (lint and format) and mypy
#   ./run.sh COMMAND ARGS    allattn COMMAND ARGS;  GPUS=2 ./run.sh train CONFIG  uses DeepSpeed
#
# PYTHON=python3.12 chooses another Python; TORCH=cpu installs a build of PyTorch without CUDA.
set -euo pipefail

fail() { # STATUS MESSAGE: one line that says what is wrong and what would be right
    echo "run.sh: $2" >&2
    exit "$1"
}

script=${BASH_SOURCE[0]}
while [ -L "$script" ]; do # through symbolic links to the checkout itself
    target=$(readlink "$script")
    case "$target" in
        /*) script=$target ;;
        *) script=$(dirname "$script")/$target ;;
    esac
done
here=$(cd "$(dirname "$script")" && pwd -P)
start_dir=$PWD
venv="$here/.venv"

need_python() {
    python=${PYTHON:-python3}
    command -v "$python" >/dev/null ||
        fail 2 "$python is not there; install Python 3.10 or newer, or set PYTHON to one"
    version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) ||
        fail 2 "$python does not run; set PYTHON to Python 3.10 or newer"
    case "$version" in
        2.* | 3.[0-9].*) fail 2 "Python 3.10 or newer is required (found $version); set PYTHON to a newer one, such as PYTHON=python3.12" ;;
    esac
}

# What an environment depends on. The first line settles whether one has to be made anew, all of
# it whether something has to be installed.
fingerprint() { # MODE
    echo "$venv $version torch=$kind $1"
    cat "$here/pyproject.toml" "$here/constraints.txt" "$here/tools/versions.py" | cksum
}

# Which build of PyTorch: what TORCH says, else what the environment was made with.
choose_kind() {
    case "${TORCH:-}" in
        cpu) kind=cpu ;;
        "") kind=$(sed -n '1s/.* torch=\([a-z]*\) .*/\1/p' "$venv/.installed" 2>/dev/null || true) ;;
        *) fail 2 "TORCH=$TORCH is not known; write TORCH=cpu, or leave it out" ;;
    esac
    kind=${kind:-default}
}

# Of pip's output, on a terminal, what it is busy with.
progress() {
    if [ -t 2 ]; then
        awk '/^ *(Collecting|Downloading|Installing)/ { print "  " substr($0, 1, 76); fflush() }' >&2
    else
        cat >/dev/null
    fi
}

# The reason why pip failed, in one line.
fail_install() {
    local log="$here/.venv-install.log" error
    error=$(grep -E 'ERROR|[Ee]rror:|No space left' "$log" | grep -v '^WARNING' | tail -n 1 || true)
    if grep -q 'No space left' "$log"; then
        fail 1 "no space left while installing into $venv; the environment needs about 6 GB (2 GB with TORCH=cpu): make room and start again"
    fi
    fail 1 "installing into $venv failed: ${error:-no message}; see $log, mend it and start again"
}

setup() { # [MODE]: tested (constraints.txt), latest or lowest
    local mode=${1:-tested} stamp="$venv/.installed" log="$here/.venv-install.log"
    local want why="" pip options=() torch=()
    need_python
    choose_kind
    want=$(fingerprint "$mode")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then return; fi
    (: >>"$here/.venv-install.lock") 2>/dev/null ||
        fail 1 "$here cannot be written to; copy the checkout to a folder where you may write, and start there"
    # one at a time: a second start waits for the first one's install, and then finds it done
    exec 9>>"$here/.venv-install.lock"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null || {
        echo "run.sh: waiting for another install into $venv" >&2
        "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
    }
    choose_kind
    want=$(fingerprint "$mode")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then
        exec 9>&-
        return
    fi
    # An environment that was not finished (killed, no space), was moved, or belongs to another
    # Python or build of PyTorch is made anew; one whose versions alone changed is brought up to date.
    if [ ! -f "$stamp" ]; then
        if [ -e "$venv" ]; then why=", anew, since an earlier install was not finished"; fi
    elif [ "$(head -n 1 "$stamp")" != "${want%%$'\n'*}" ] || ! "$venv/bin/python" -c '' 2>/dev/null; then
        why=", anew, since it was made for another folder, Python or build of PyTorch"
    else
        why=", since pyproject.toml or constraints.txt changed"
    fi
    if [ "$kind" = cpu ]; then # before anything is deleted: is there such a build?
        pip=$venv/bin/python
        "$pip" -m pip --version >/dev/null 2>&1 || pip=$python
        torch=("$("$pip" "$here/tools/versions.py" cpu-torch "$mode")") || exit 1
    fi
    echo "run.sh: installing into $venv$why (two to five minutes, most of it downloads)" >&2
    case "$why" in
        "" | ", anew"*)
            rm -rf "$venv"
            "$python" -m venv "$venv" >"$log" 2>&1 ||
                fail 1 "$python cannot make a virtual environment; install its venv module (Debian: apt install python3-venv), or set PYTHON to another (details: $log)"
            ;;
    esac
    rm -f "$stamp"
    "$venv/bin/python" "$here/tools/versions.py" "$mode" >"$venv/constraints.txt"
    options=(--constraint "$venv/constraints.txt")
    if [ "$mode" = latest ]; then options+=(--upgrade --upgrade-strategy eager); fi
    (cd "$here" && "$venv/bin/python" -m pip install "${options[@]}" \
        ${torch[@]+"${torch[@]}"} --editable '.[dev]') 2>&1 9>&- | tee "$log" | progress ||
        fail_install
    echo "$want" >"$stamp"
    exec 9>&-
}

demo() {
    cd "$here"
    local run=runs/demo allattn="$venv/bin/allattn"
    "$allattn" prepare --dataset tiny --tokenizer sentencepiece --vocab-size 2000 --out data/tiny
    # an earlier demo is continued where it stopped; a finished one is only evaluated again
    "$allattn" train tiny --resume
    "$allattn" evaluate "$run" --split test
    "$allattn" export "$run" --out exports/demo --overwrite
    echo
    "$allattn" compare "dense=$run/checkpoints/step_00000300" \
        "pruned=$run/checkpoints/step_00000450" "fine-tuned=$run/final" "exported=exports/demo" \
        --out "$run/compare"
    echo
    "$allattn" generate exports/demo --prompt "Anne " --max-new-tokens 80 --temperature 0.8 --top-k 40
    echo
    echo "Watch the run:  $venv/bin/tensorboard --logdir $here/runs"
}

if [ "${1:-}" = test ]; then
    mode=tested
    case "${2:-}" in
        --latest | --lowest)
            mode=${2#--}
            venv="$here/.venv-$mode"
            set -- test "${@:3}"
            ;;
    esac
    setup "$mode"
    shift
    cd "$here"
    export PATH="$venv/bin:$PATH"
    exec "$venv/bin/python" -m pytest -n 2 --dist worksteal --durations=10 "$@"
fi

setup
export PATH="$venv/bin:$PATH"
cd "$start_dir"
case "${1:-}" in
    "") demo ;;
    setup) ;;
    check)
        cd "$here"
        ruff check .
        ruff format --check .
        mypy
        ;;
    train)
        if [ -n "${GPUS:-}" ]; then
            # ranks on CPU cores, talking over gloo, where there is no GPU
            flag=$("$venv/bin/python" -c \
                'import torch; print("--num_gpus" if torch.cuda.is_available() else "--num_accelerators")')
            exec "$venv/bin/deepspeed" "$flag" "$GPUS" --no_local_rank --module allattn "$@"
        fi
        exec "$venv/bin/allattn" "$@"
        ;;
    *) exec "$venv/bin/allattn" "$@" ;;
esac
