"""What runs an optimiser step: `LocalEngine` (one process, plain torch) or `DeepSpeedEngine`.

Both have the same methods and give the same losses. Parameters stay float32 in both (lower
precision is autocast, set by the trainer), so gates are float32 under every ZeRO stage. This file
alone imports deepspeed.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from allattn.config import Config, ConfigError
from allattn.model.transformer import Output, TransformerLM
from allattn.training.optim import build_optimizer, group_of
from allattn.training.ranks import PeerWatch, World
from allattn.training.state import MOMENTS, Snapshot


def connect(config: Config) -> World:
    """Join the ranks of the launcher, or stay alone."""
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    use_deepspeed = config.train.engine == "deepspeed" or (
        config.train.engine == "auto" and launched
    )
    if config.train.engine == "local" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("train.engine: local runs in one process; use auto under the launcher")
    kind = config.train.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("train.device: cuda is not available here; use auto or cpu")
    if not use_deepspeed:
        return World(0, 1, torch.device(kind), deepspeed=False)
    if kind == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if not launched:
        # one process meets nobody, so it needs no port, which another could take meanwhile;
        # DeepSpeed names its shared memory by the port, so we give it a number of our own
        own = str(os.getpid())
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=own
        )
        store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # not in its __all__
        backend = "nccl" if kind == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    _start_deepspeed(kind)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    watch = PeerWatch(rank, size) if size > 1 else None
    return World(rank, size, device, deepspeed=True, watch=watch)


def build_engine(
    model: TransformerLM, config: Config, world: World, n_micro: int, snapshot: Snapshot | None
) -> LocalEngine | DeepSpeedEngine:
    """An engine for a model that already holds the snapshot's weights; moments come from it too.

    Raises:
        ConfigError: an optimiser that DeepSpeed cannot have.
    """
    if world.deepspeed and config.train.optimizer.name != "adamw":
        raise ConfigError(
            f"train.optimizer.name: {config.train.optimizer.name} is for one process without "
            "DeepSpeed, whose ZeRO stages cut matrices up; use adamw"
        )
    kind = DeepSpeedEngine if world.deepspeed else LocalEngine
    return kind(model.to(world.device), config, world, n_micro, snapshot or Snapshot({}))


class LocalEngine:
    """One process, torch's own AdamW."""

    def __init__(
        self, model: TransformerLM, config: Config, world: World, n_micro: int, snapshot: Snapshot
    ):
        """Take over a model; moments that the snapshot lacks start at zero."""
        self.module, self.n_micro, self.clip_norm = model, n_micro, config.train.clip_norm
        self.optimizer = build_optimizer(model, config.train.optimizer)
        for name, parameter in model.named_parameters():
            if name in snapshot.adam_steps:
                self.optimizer.state[parameter] = _adam_state(snapshot, name, world.device)

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Forward."""
        output: Output = self.module(*args, **kwargs)
        return output

    def backward(self, loss: Tensor, last: bool, scale: float = 1.0) -> None:
        """Accumulate the gradient of one micro-batch's share of the mean loss, times `scale`."""
        (loss * (scale / self.n_micro)).backward()

    def step(self, lrs: dict[str, float], scale: float = 1.0) -> float:
        """Undo the scale, clip, update with these rates by group kind, clear gradients.

        Returns:
            The gradient norm before clipping. Where it is not finite, nothing was updated.
        """
        if scale != 1.0:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            torch._foreach_mul_(grads, 1 / scale)
        norm = float(
            torch.nn.utils.clip_grad_norm_(
                self.module.parameters(), self.clip_norm or float("inf"), foreach=True
            )
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lrs[group["kind"]]
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def gate_grad_norm(self, scale: float = 1.0) -> float:
        """The part of `step`'s norm that is the gates', to be asked for before it."""
        named = self.module.named_parameters()
        grads = [p.grad for name, p in named if group_of(name) == "gates" and p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) / scale

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """Some parameters by name, on the CPU; there they share storage until the next step."""
        return {n: p.detach().cpu() for n, p in self.module.named_parameters() if wanted(n)}

    def snapshot(self) -> Snapshot:
        """Weights and moments; on the CPU they share storage until the next step."""
        out = Snapshot(self.read(lambda name: True))
        for name, parameter in self.module.named_parameters():
            state = self.optimizer.state.get(parameter)
            if state:
                out.adam_steps[name] = int(state["step"])
                for key in MOMENTS:
                    out.moments[key][name] = state[key].detach().cpu()
        return out

    def close(self) -> None:
        """Nothing to release."""


class DeepSpeedEngine:
    """DeepSpeed with float32 parameters and any ZeRO stage."""

    def __init__(
        self, model: TransformerLM, config: Config, world: World, n_micro: int, snapshot: Snapshot
    ):
        """Wrap a model; moments that the snapshot lacks start at zero."""
        import deepspeed

        self.names = {p: n for n, p in model.named_parameters()}
        lanes = config.train.batch_size // world.size
        settings = {
            **config.deepspeed,
            "train_batch_size": config.train.batch_size,
            "train_micro_batch_size_per_gpu": lanes // n_micro,
            "gradient_accumulation_steps": n_micro,
            "gradient_clipping": config.train.clip_norm,
            "steps_per_print": config.deepspeed.get("steps_per_print", 10**9),
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # offloading works with torch's AdamW too
        }
        self.stage = int((config.deepspeed.get("zero_optimization") or {}).get("stage", 0))
        self.engine, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=build_optimizer(model, config.train.optimizer), config=settings
        )
        self.module: TransformerLM = self.engine.module
        if snapshot.adam_steps:
            self._load_moments(snapshot)

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        """Forward."""
        output: Output = self.engine(*args, **kwargs)
        return output

    def backward(self, loss: Tensor, last: bool, scale: float = 1.0) -> None:
        """Accumulate; DeepSpeed divides by the number of micro-batches and reduces over ranks."""
        if self.stage == 0:
            loss = loss * scale
        elif scale != 1.0:
            self.optimizer.override_loss_scale(scale)
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # counts the micro-batch; updates nothing before the last

    def step(self, lrs: dict[str, float], scale: float = 1.0) -> float:
        """As `LocalEngine.step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lrs[group["kind"]]
        if self.stage == 0:  # DeepSpeed neither unscales there, nor tells the norm, nor looks at it
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
            if scale != 1.0:
                torch._foreach_mul_(grads, 1 / scale)
            norm = float(torch.nn.utils.get_total_norm(grads))
            if not math.isfinite(norm):
                self.module.zero_grad(set_to_none=True)  # so that the step below updates nothing
            self.engine.step()
            return norm
        self.engine.step()
        if self.optimizer.overflow:
            return math.inf
        return float(self.engine.get_global_grad_norm())

    def gate_grad_norm(self, scale: float = 1.0) -> float:
        """As `LocalEngine.gate_grad_norm` (all ranks must call it)."""
        from deepspeed.utils import safe_get_full_grad

        gates = [p for p, name in self.names.items() if group_of(name) == "gates"]
        grads = [safe_get_full_grad(p).float() for p in gates]
        return float(torch.nn.utils.get_total_norm(grads)) / scale

    def read(self, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
        """Some full parameters by name, on the CPU of every rank (all ranks must call it)."""
        from deepspeed.utils import safe_get_full_fp32_param

        return {
            name: (p if self.stage == 0 else safe_get_full_fp32_param(p)).detach().cpu()
            for p, name in self.names.items()
            if wanted(name)
        }

    def snapshot(self) -> Snapshot:
        """Full weights and moments on the CPU of every rank (all ranks must call it)."""
        from deepspeed.utils import safe_get_full_optimizer_state

        out = Snapshot(self.read(lambda name: True))
        if self.stage in (1, 2):
            self._link_moments()
        for parameter, name in self.names.items():
            state = self._adam_state(parameter)
            if not state:
                continue
            out.adam_steps[name] = int(state["step"])
            for key in MOMENTS:
                full = (
                    state[key] if self.stage == 0 else safe_get_full_optimizer_state(parameter, key)
                )
                out.moments[key][name] = full.detach().cpu().view(out.parameters[name].shape)
        return out

    def close(self) -> None:
        """Release hooks and buffers, so that another engine can take the weights over."""
        self.engine.destroy()

    # DeepSpeed keeps one Adam state for each flat tensor of a group, not for each parameter.

    def _flat_tensors(self) -> list[tuple[list[torch.nn.Parameter], Tensor]]:
        """(parameters, the flat tensor that holds this rank's share of them) for ZeRO 1 to 3."""
        zero = self.optimizer
        if self.stage == 3:
            return list(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True))
        return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))

    def _adam_state(self, parameter: torch.nn.Parameter) -> dict[str, Any] | None:
        """The Adam state that this parameter is part of; None before its first step."""
        state: dict[str, Any] | None
        if self.stage == 0:
            state = self.optimizer.state.get(parameter)
            return state
        for members, flat in self._flat_tensors():
            if any(member is parameter for member in members):
                state = self.optimizer.optimizer.state.get(flat)
                return state
        raise AssertionError("every parameter is in a group")

    def _load_moments(self, snapshot: Snapshot) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        if self.stage == 0:
            for parameter, name in self.names.items():
                if name in snapshot.adam_steps:
                    self.optimizer.state[parameter] = _adam_state(snapshot, name, parameter.device)
            return
        known: list[torch.nn.Parameter] = []
        for members, flat in self._flat_tensors():
            steps = {snapshot.adam_steps.get(self.names[p]) for p in members}
            assert len(steps) == 1, "parameters of a group were updated together"
            step = steps.pop()
            if step is not None:
                self.optimizer.optimizer.state[flat] = {
                    "step": torch.tensor(float(step), device=flat.device),
                    **{key: torch.zeros_like(flat) for key in MOMENTS},
                }
                known += members
        if self.stage in (1, 2):
            self._link_moments()
        for parameter in known:
            for key in MOMENTS:
                value = snapshot.moments[key][self.names[parameter]].to(self.engine.device)
                if self.stage == 3:
                    self._set_share(parameter, value, key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)

    def _set_share(self, parameter: torch.nn.Parameter, value: Tensor, key: str) -> None:
        """This rank's share of a moment under ZeRO-3.

        DeepSpeed's own setter overruns a tensor of fewer numbers than ranks (a layer's last gate).
        """
        share, _ = self.optimizer._get_fp32_opt_state_partition(parameter, False, key)
        start = share.numel() * torch.distributed.get_rank()
        mine = value.flatten()[start : start + share.numel()]
        share.zero_()
        share[: mine.numel()] = mine

    def _link_moments(self) -> None:
        """Tell ZeRO 1 and 2 where each parameter's moments lie.

        It does so itself once, in the first group's first step, when other groups have none yet.
        """
        for members, flat in self._flat_tensors():
            state = self.optimizer.optimizer.state.get(flat)
            for parameter in members:
                mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # DeepSpeed's
                if state and mapping is not None:
                    mapping.set_optim_state_fragment(flat, state)


def _adam_state(snapshot: Snapshot, name: str, device: torch.device) -> dict[str, Tensor]:
    """torch.optim.AdamW's state of one parameter; the fused one reads its step on the device."""
    moments = {key: snapshot.moments[key][name].to(device, copy=True) for key in MOMENTS}
    return {"step": torch.tensor(float(snapshot.adam_steps[name]), device=device), **moments}


def _start_deepspeed(kind: str) -> None:
    """Import DeepSpeed and join its process group, with a word on the one slow start."""
    rank = os.environ["RANK"]
    if rank == "0":
        print(
            "allattn: starting DeepSpeed; the first start on a machine compiles an operator "
            "(about a minute, needs g++)",
            file=sys.stderr,
            flush=True,
        )
    import deepspeed

    if kind == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        # without a compiler gloo carries the traffic between CPU ranks alone
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if rank == "0":
            print("allattn: no C++ compiler found; going on without that operator", file=sys.stderr)
    deepspeed.init_distributed("nccl" if kind == "cuda" else "gloo", verbose=False)
