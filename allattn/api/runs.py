"""Describes what a config comes to, and trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from allattn.api.arguments import config_of
from allattn.config import Config, ModelConfig, with_vocabulary


def describe(config: Config | str | Path) -> dict[str, Any]:
    """Say what a config comes to, without training: sizes, costs and stages.

    Args:
        config: A config, or the path or name of one.

    Returns:
        `params`, `params_embedding`, `params_non_embedding` and `params_by_part` (numbers of
        parameters), `flops_per_token` (of a forward pass), `heads` (by layer) and `stages` (a list
        of `name`, `first_step`, `last_step`, `what`). What depends on the vocabulary is None until
        the corpus is prepared, or `model.vocab_size` is set.

    Raises:
        ConfigError: The config cannot be used.
        ValueError: The corpus, or the run that `run.init_structure` names, is damaged.
    """
    from allattn.model.transformer import count_parameters, flops_per_token
    from allattn.pruning.budget import stage_table
    from allattn.training.state import with_structure

    config = config_of(config)
    model = with_structure(config)
    if model.vocab_size is None and (Path(config.data.dir) / "data.json").exists():
        from allattn.data.lanes import Corpus

        model = with_vocabulary(model, Corpus(config.data.dir).vocab_size, config.data.dir)
    known = model.vocab_size is not None
    stand_in = model if known else ModelConfig(**{**vars(model), "vocab_size": 2, "cutoffs": []})
    counted = count_parameters(stand_in)
    vocabulary = counted["vocabulary"] if known else None
    rest = sum(n for part, n in counted.items() if part != "vocabulary")
    return {
        "params": None if vocabulary is None else rest + vocabulary,
        "params_embedding": vocabulary,
        "params_non_embedding": rest,
        "params_by_part": {**counted, "vocabulary": vocabulary},
        "flops_per_token": flops_per_token(model) if known else None,
        "heads": model.heads,
        "stages": stage_table(config, model),
    }


def train(config: Config | str | Path, resume: bool = False) -> Path | None:
    """Run the stages of a config, and export the model that they end with.

    The run is written into `run.dir/run.name`: its metrics, checkpoints and TensorBoard events.
    Under the DeepSpeed launcher all ranks call this; otherwise one process trains.

    Args:
        config: A config, or the path or name of one.
        resume: Go on from the newest checkpoint in the run's folder, if there is one.

    Returns:
        The folder of the final model, `final` in the run's folder; None on ranks other than 0.

    Raises:
        ConfigError: The config cannot be used, or the run's folder exists without `resume`.
        ValueError, OSError: The corpus or a checkpoint is missing or damaged.
        RuntimeError: Training stopped: a loss that is not finite, a checkpoint that could not be
            written, another rank that is gone, or SIGTERM.
    """
    from allattn.inference.export import export
    from allattn.inference.load import open_source
    from allattn.training.trainer import Trainer

    trainer = Trainer(config_of(config), resume=resume)
    trainer.train()
    trainer.close()  # the other ranks need not wait for the evaluation of the export
    if trainer.world.rank != 0:
        return None
    newest = trainer.run_dir / "checkpoints" / f"step_{trainer.step:08d}"
    if not newest.exists():
        raise RuntimeError(
            f"{trainer.run_dir}: trained to the end, but step {trainer.step} could not be "
            "saved, so there is no final model; make room and continue with --resume"
        )
    return export(open_source(newest), trainer.run_dir / "final", overwrite=True)
