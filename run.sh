#!/usr/bin/env bash
# The whole job on the corpus that ships with the package, or any part of it.
#
#   ./run.sh                 prepare, train (dense, prune, fine-tune), evaluate, export, generate
#   ./run.sh setup           only make .venv and install
#   ./run.sh test [ARGS]     the test suite
#   ./run.sh COMMAND ARGS    allattn COMMAND ARGS;  GPUS=2 ./run.sh train CONFIG  uses DeepSpeed
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv="$here/.venv"
start_dir=$PWD

setup() {
    local stamp="$venv/.installed" want
    want=$(cksum "$here/pyproject.toml")
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then return; fi
    local python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "run.sh: Python 3.10 or newer is needed, $("$python" --version) found; set PYTHON" >&2
        exit 2
    }
    echo "run.sh: installing into $venv (once; a minute or more)" >&2
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
    (cd "$here" && "$venv/bin/python" -m pip install --quiet --editable '.[dev]') >&2
    echo "$want" >"$stamp"
}

demo() {
    cd "$here"
    local run=runs/demo allattn="$venv/bin/allattn"
    "$allattn" prepare --dataset tiny --tokenizer sentencepiece --vocab-size 2000 --out data/tiny
    # an earlier demo is continued where it stopped; a finished one is only evaluated again
    "$allattn" train configs/tiny.yaml --resume
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

setup
export PATH="$venv/bin:$PATH"
cd "$start_dir"
case "${1:-}" in
    "") demo ;;
    setup) ;;
    test) shift && cd "$here" && exec "$venv/bin/python" -m pytest -n 2 --dist worksteal "$@" ;;
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
