"""Optimisers and learning-rate schedules."""

import math

import torch
from torch import nn

from sinklab.train.config import AdamW, Muon, OptimConfig, ScheduleConfig, Sgd


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser of a model. Weight decay applies to all parameters, as in the paper's code (2410.10781).

    `config.lr` is only the initial learning rate; `Updater` sets the scheduled one before each step.
    """
    match config:
        case AdamW():
            return _adamw(list(model.parameters()), config)
        case Sgd():
            return torch.optim.SGD(
                model.parameters(),
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
            )
        case Muon():
            return MuonAndAdamW(model, config)


class MuonAndAdamW(torch.optim.Optimizer):
    """One optimiser made of `torch.optim.Muon` for `hidden_matrices` and AdamW for all other parameters.

    `param_groups` contains the groups of both optimisers, and both use this object's `state`.
    """

    def __init__(self, model: nn.Module, config: Muon) -> None:
        hidden = hidden_matrices(model)
        names = {id(parameter) for parameter in hidden}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in names]
        decay, momentum, scale = config.weight_decay, config.momentum, "match_rms_adamw"
        muon = torch.optim.Muon(hidden, lr=config.lr, weight_decay=decay, momentum=momentum, adjust_lr_fn=scale)
        self.parts = [muon, _adamw(rest, config)]
        super().__init__([{"params": hidden}, {"params": rest}], {"lr": config.lr})
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            part.state = self.state

    def step(self) -> None:  # type: ignore[override]  # no closure
        """Do one step of both optimisers."""
        for part in self.parts:
            part.step()


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights that Muon updates: those of linear layers in the blocks, `embedding_map` and `head_map`."""
    return [
        module.get_parameter("weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(("blocks.", "embedding_map", "head_map"))
    ]


def _adamw(parameters: list[nn.Parameter], config: AdamW | Muon) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleConfig) -> float:
    """Compute the learning rate of the update from `step` to `step + 1`, of `steps` in total.

    During warm-up it is peak * (step + 1) / warmup_steps. After warm-up it is
    - flat: peak;
    - cosine: min_lr + (peak - min_lr) * (1 + cos(pi * p)) / 2, p linear from 0 after the warm-up to 1 at step `steps`;
    - wsd: peak; in the last decay_fraction * steps steps min_lr + (peak - min_lr) * p, p linear from 1 to 0 at step
        `steps`. If warm-up and decay overlap, the smaller of the two rates is used.
    """
    span = peak - schedule.min_lr
    ceiling = peak
    if schedule.shape == "wsd" and steps - step < (length := schedule.decay_fraction * steps):
        ceiling = schedule.min_lr + span * (steps - step) / length
    if step < schedule.warmup_steps:
        return min(ceiling, peak * (step + 1) / schedule.warmup_steps)
    if schedule.shape == "wsd":
        return ceiling
    if schedule.shape == "flat":
        return peak
    progress = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    return schedule.min_lr + span * (1 + math.cos(math.pi * progress)) / 2
