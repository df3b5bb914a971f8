"""Optimisers and learning-rate schedules."""

import math
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from sinklab.attention.layer_call import AttentionCore
from sinklab.model.block import Attention
from sinklab.model.transformer import Transformer
from sinklab.train.recipe import AdamW, Muon, OptimConfig, OrthoAdam, ScheduleConfig, Sgd
from sinklab.train.world import World

QUERIES_AT_ONCE = 256
LONGEST_ROTATED = 4096
"""Longest axis of a parameter whose gradient OrthoAdam rotates; its matrix has this number squared of entries."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimiser of a model. Weight decay applies to all parameters, as in the paper's code (2410.10781).

    `config.lr` is only the initial learning rate; `Updater` sets the scheduled one before each step.
    """
    match config:
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
        case OrthoAdam():
            return RotatedAdamW(model, config)
        case AdamW():  # the base class of the two above
            return _adamw(list(model.parameters()), config)


class MuonAndAdamW(torch.optim.Optimizer):
    """One optimiser made of `torch.optim.Muon` for `hidden_matrices` and AdamW for all other parameters.

    `param_groups` contains the groups of both optimisers, and both use this object's `state`.
    """

    def __init__(self, model: nn.Module, config: Muon) -> None:
        hidden = hidden_matrices(model)
        ids = {id(parameter) for parameter in hidden}
        rest = [parameter for parameter in model.parameters() if id(parameter) not in ids]
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


class RotatedAdamW(torch.optim.Optimizer):
    """AdamW with moments of rotated gradients (`OrthoAdam`).

    The rotations are not in `state`: they follow from the place of a parameter in the model, its shape and the axis.
    """

    def __init__(self, model: nn.Module, config: OrthoAdam) -> None:
        super().__init__(model.parameters(), {"lr": config.lr})
        self._config = config
        self._rotations: dict[Tensor, list[Tensor | None]] = {}

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        """Do one step."""
        (beta_1, beta_2), eps, decay = self._config.betas, self._config.eps, self._config.weight_decay
        for group in self.param_groups:
            for number, weight in enumerate(group["params"]):
                if weight.grad is None:
                    continue
                if weight not in self._rotations:
                    found = [rotation(number, axis, length) for axis, length in enumerate(weight.shape)]
                    self._rotations[weight] = [None if one is None else one.to(weight) for one in found]
                rotations = self._rotations[weight]
                gradient, state = _rotated(weight.grad, rotations), self.state[weight]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                state["step"] += 1
                first, second, done = state["exp_avg"], state["exp_avg_sq"], state["step"].item()
                first.lerp_(gradient, 1 - beta_1)
                second.mul_(beta_2).addcmul_(gradient, gradient, value=1 - beta_2)
                scaled = (second / (1 - beta_2**done)).sqrt() + eps
                change = _rotated(first / (1 - beta_1**done) / scaled, rotations, back=True)
                weight.mul_(1 - group["lr"] * decay).sub_(group["lr"] * change)


def rotation(number: int, axis: int, length: int) -> Tensor | None:
    """Return the orthogonal matrix (length, length), float32, for an axis of a model's `number`-th parameter.

    It is uniformly distributed over the orthogonal group (Mezzadri, 2007), and None for an axis longer than 4,096.
    The third axis of a parameter has the seed of the next parameter's first axis.
    """
    if length > LONGEST_ROTATED:
        return None
    generator = torch.Generator().manual_seed(2 * number + axis)
    q, r = torch.linalg.qr(torch.randn(length, length, generator=generator))
    return q * r.diagonal().sign()


def _rotated(x: Tensor, rotations: list[Tensor | None], back: bool = False) -> Tensor:
    for axis, matrix in enumerate(rotations):
        if matrix is not None:
            x = (x.movedim(axis, -1) @ (matrix if back else matrix.mT)).movedim(-1, axis)
    return x


def _adamw(parameters: list[nn.Parameter], config: AdamW) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class QKClip:
    """QK-Clip: limits the attention logits of a model by the weights of its queries and keys.

    After an update, the query and key weights of a KV head are multiplied by sqrt(tau / S) if S > tau. S is the largest
    q.k / sqrt(D) of the update's batch, over all pairs of a query and a key that it sees and all query heads of the KV
    head (2507.20534, algorithm 1; for several query heads as in Megatron-LM's `clip_qk`).

    Args:
        model: model whose training forward passes are read, by hooks of its attention cores.
        tau: limit of the logits.
        world: training processes.
    """

    def __init__(self, model: Transformer, tau: float, world: World) -> None:
        self._tau, self._world = tau, world
        self._layers = cast(list[Attention], [block.attention for block in model.blocks])
        self._largest: dict[int, Tensor] = {}  # S by layer, (G,)
        for index, layer in enumerate(self._layers):
            layer.core.register_forward_pre_hook(partial(self._read, index))

    @torch.no_grad()
    def clip(self) -> None:
        """Scale the weights after an update."""
        for index, largest_G in sorted(self._largest.items()):
            layer, S_G = self._layers[index], self._world.max_on_device(largest_G)
            factor_G11 = (self._tau / S_G.clamp(min=self._tau)).sqrt()[:, None, None]
            assert layer.qkv is not None, "a latent projection is refused"
            heads_OdE = layer.qkv.weight.unflatten(0, (-1, layer.head_width))  # of queries, keys, values
            heads_OdE[: layer.heads].mul_(factor_G11.repeat_interleave(layer.heads // layer.key_heads, 0))
            heads_OdE[layer.heads : layer.heads + layer.key_heads].mul_(factor_G11)
        self._largest.clear()

    def _read(self, index: int, core: AttentionCore, args: tuple[Tensor | None, ...]) -> None:
        if not torch.is_grad_enabled():
            return  # an evaluation, or a forward pass that is computed again (`train.recompute`)
        q_BHTD, k_BGTD, _, documents_BT, _, padding_B = args
        assert q_BHTD is not None
        assert k_BGTD is not None
        q_BGRTD, mask = q_BHTD.detach().unflatten(1, (k_BGTD.shape[1], -1)), core.mask_of_batch(documents_BT, padding_B)
        T, found = q_BHTD.shape[2], [self._largest[index]] if index in self._largest else []
        for first in range(0, T, QUERIES_AT_ONCE):
            end = min(first + QUERIES_AT_ONCE, T)
            low, high = mask.key_range(first, end, T)
            z_BGRQK = q_BGRTD[:, :, :, first:end] @ k_BGTD.detach()[:, :, None, low:high].mT
            seen = mask.block(first, end, low, high, z_BGRQK.device).expand(*mask.sizes, *z_BGRQK.shape[-2:])[
                :, :, None
            ]
            found.append(z_BGRQK.float().masked_fill(~seen, -math.inf).amax((0, 2, 3, 4)) * q_BHTD.shape[3] ** -0.5)
        self._largest[index] = torch.stack(found).amax(0)


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
