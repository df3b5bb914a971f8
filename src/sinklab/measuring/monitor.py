"""`sinklab.monitor`: the sink in the forward passes of a training step, without a pass of its own.

    monitor = sinklab.monitor(model, every=100)
    for step, batch in enumerate(loader):
        with monitor(step) as numbers:           # records if `step` is a multiple of `every`
            loss = model(**batch).loss
        loss.backward()
        ...
        if numbers:
            wandb.log(numbers, step=step)        # or TensorBoard, trackio, print

    Trainer(.., callbacks=[sinklab.monitor(model, every=100).callback()])            # transformers and trl
    Trainer(.., callbacks=[sinklab.monitor(model, every=100).lightning_callback()])  # Lightning

The model's own attention functions are called, so that losses and gradients remain the same bit for bit. Code compiled
by torch.compile runs uncompiled in a block that records, equal up to rounding, and compiled in all others. All numbers
are of the training batch: means over its sequences (of all micro-batches in the block), padding left out. The sequences
packed into a row (`position_ids` that restart, `cu_seq_lens_q`) count one by one, if attention does not cross them.

    sink/rate, sink/rate_layer_l        percentage of (sequence, layer, head) triples with alpha_1 > eps; of one layer
    sink/share, sink/share_layer_l      alpha_1, the mean attention of the queries to the first token
    sink/bias_share                     mean attention to biases, sink logits and sink tokens, if there are any
    sink/entropy, sink/entropy_layer_l  - sum A ln A of the rows, mean over queries and heads, nats
    sink/largest_logit, .._layer_l      the largest q.k / sqrt(D) over heads, queries and keys
    sink/largest_activation             the largest |h| after a block divided by the median |h|, maximum over blocks
    sink/kurtosis                       kurtosis of h over channels, mean over tokens, maximum over blocks
    sink/hot_channel_records            most records in a row in which one channel had a massive activation, or 0
    sink/gate, sink/gate_layer_l        mean gate of the attention outputs or values, for models of sinklab with gates
"""

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from sinklab.attention.layer_call import LayerCall
from sinklab.attention.masks import visible_keys
from sinklab.errors import InputError, require_extra
from sinklab.measuring.findings import MASSIVE, MASSIVE_RATIO
from sinklab.measuring.statistics.details import kurtosis
from sinklab.models.adapter import LanguageModel, NativeAdapter, adapt
from sinklab.models.hooks import (
    forward_signature,
    hooked,
    intercept,
    named_arguments,
    residual_stream,
    uncompiled,
)
from sinklab.models.huggingface.interface import packed_sequences

if TYPE_CHECKING:
    from transformers import Trainer

SPIKES = ("sink/largest_logit", "sink/largest_activation", "sink/kurtosis")
"""Numbers that are compared with their past values for alerts."""
SPIKE, PAST = 3.0, 8  # an alert is a value above SPIKE times the median of the last PAST values


class Monitor:
    """Records the sink in the forward passes of training steps (see the module).

    Attributes:
        every: steps between records.
        numbers: numbers of the last record; empty before the first.
        largest_logit_LH: largest logit of every layer and head in the last record; None before the first.
        hot_channels: channels with a massive activation in the last record, with the number of records in a row in
            which they had one.
    """

    def __init__(
        self, model: LanguageModel, every: int = 100, eps: float = 0.3, alert: Callable[[str], None] = warnings.warn
    ) -> None:
        if every < 1:
            raise InputError(f"every={every}: pass the number of steps between records, 1 or more")
        if not 0 < eps < 1:
            raise InputError(f"eps={eps}: pass a threshold between 0 and 1")
        self.every, self.numbers = every, dict[str, float]()
        self.largest_logit_LH: Tensor | None = None
        self.hot_channels = dict[int, int]()
        self._adapter, self._eps, self._alert = adapt(model), eps, alert
        self._past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=PAST))

    @contextmanager
    def __call__(self, step: int) -> Iterator[dict[str, float]]:
        """Record the forward passes in the `with` block if `step` is a multiple of `every`.

        Yields:
            A dict that has the numbers after the block; empty if nothing is recorded.
        """
        numbers = dict[str, float]()
        if step % self.every:
            yield numbers
            return
        record = _Record(self._adapter.leading)
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.enter_context(
                hooked([self._adapter.module.register_forward_pre_hook(record.entering, with_kwargs=True)])
            )
            stack.enter_context(intercept(self._adapter, observe=record.observe, unchanged=True))
            if isinstance(self._adapter, NativeAdapter):
                stack.enter_context(self._adapter.gated(record.gate))
            stream = stack.enter_context(residual_stream(self._adapter.blocks, _activations))
            yield numbers
            blocks = stream[1:]
        if record.shares:
            numbers.update(self._read(record, blocks))
            self.numbers = dict(numbers)

    def callback(self) -> "MonitorCallback":
        """Return a callback for the Trainer of transformers and trl, which adds the numbers to the Trainer's log."""
        return MonitorCallback(self)

    def lightning_callback(self) -> Any:
        """Return a callback for the Trainer of Lightning, which gives the numbers to its loggers.

        With gradient accumulation, the micro-batches of an optimiser step are recorded together.

        Raises:
            InputError: if Lightning is not installed.
        """
        require_extra("lightning", ["lightning"], "a callback for Lightning")
        from lightning.pytorch import Callback

        monitor = self

        class LightningMonitor(Callback):
            """Gives the numbers of a `Monitor` to the loggers of a Trainer, at the step at which they were recorded."""

            block: Any = None

            def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
                if self.block is None:
                    self.step = trainer.global_step
                    self.block = monitor(self.step)
                    self.numbers = self.block.__enter__()

            def on_train_batch_end(
                self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
            ) -> None:
                if trainer.global_step > self.step:
                    self.end()
                    for logger in trainer.loggers if self.numbers else ():
                        logger.log_metrics(self.numbers, step=self.step)

            def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
                self.end()

            def on_train_end(self, trainer: Any, pl_module: Any) -> None:
                self.end()

            def end(self) -> None:
                """End the record of a step, if there is one."""
                if self.block is not None:
                    self.block.__exit__(None, None, None)
                    self.block = None

        return LightningMonitor()

    def _read(self, record: "_Record", blocks: list[tuple[float, float, float, int]]) -> Mapping[str, float]:
        shares = {index: torch.cat(parts) for index, parts in sorted(record.shares.items())}
        rates = {index: 100 * float((share_NH > self._eps).float().mean()) for index, share_NH in shares.items()}
        logits = {index: torch.stack(parts).amax(0) for index, parts in sorted(record.logits.items())}
        entropies = {index: sum(parts) / len(parts) for index, parts in sorted(record.entropies.items())}
        if len({len(one) for one in logits.values()}) == 1:
            self.largest_logit_LH = torch.stack([*logits.values()])
        numbers = {
            "sink/rate": sum(rates.values()) / len(rates),
            "sink/share": float(torch.stack([one.mean() for one in shares.values()]).mean()),
            "sink/entropy": sum(entropies.values()) / len(entropies),
            "sink/largest_logit": max(float(one.max()) for one in logits.values()),
        }
        if record.biases:
            numbers["sink/bias_share"] = sum(record.biases) / len(record.biases)
        if record.gates:
            gates = {index: sum(parts) / len(parts) for index, parts in sorted(record.gates.items())}
            numbers["sink/gate"] = sum(gates.values()) / len(gates)
            numbers |= {f"sink/gate_layer_{index}": value for index, value in gates.items()}
        if blocks:
            massive = {channel for largest, ratio, _, channel in blocks if largest > MASSIVE and ratio >= MASSIVE_RATIO}
            self.hot_channels = {channel: self.hot_channels.get(channel, 0) + 1 for channel in sorted(massive)}
            numbers["sink/largest_activation"] = max(ratio for _, ratio, _, _ in blocks)
            numbers["sink/kurtosis"] = max(value for _, _, value, _ in blocks)
            numbers["sink/hot_channel_records"] = float(max(self.hot_channels.values(), default=0))
        for index in shares:
            numbers[f"sink/rate_layer_{index}"] = rates[index]
            numbers[f"sink/share_layer_{index}"] = float(shares[index].mean())
            numbers[f"sink/entropy_layer_{index}"] = entropies[index]
            numbers[f"sink/largest_logit_layer_{index}"] = float(logits[index].max())
        for name in SPIKES:
            if (value := numbers.get(name)) is not None:
                past = self._past[name]
                if len(past) == PAST and value > SPIKE * median(past):
                    self._alert(
                        f"{name} is {value:.4g}, more than {SPIKE:g} times its median of the last {PAST} records"
                    )
                past.append(value)
        return numbers


monitor = Monitor


class _Record:
    """Statistics of the attention in the forward passes of one training step, by attention layer (1-based)."""

    def __init__(self, leading: int) -> None:
        self.shares: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.logits: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.entropies: defaultdict[int, list[float]] = defaultdict(list)
        self.biases: list[float] = []
        self.gates: defaultdict[int, list[float]] = defaultdict(list)
        self._leading = leading
        self._mask_BT: Tensor | None = None
        self._packed_BT: Tensor | None = None

    def entering(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: keep the padding mask and the numbers of packed sequences."""
        given = named_arguments(forward_signature(module), args, kwargs)
        mask = given.get("attention_mask")
        self._mask_BT = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self._packed_BT = packed_sequences(**{**given, **kwargs})

    @torch.no_grad()
    def gate(self, index: int, gates_BHTX: Tensor) -> None:
        """Read the gates of an attention layer."""
        counted_BT = self._counted(gates_BHTX[:, 0])
        self.gates[index].append(float(gates_BHTX.float().mean((1, 3))[counted_BT].mean()))

    def _counted(self, x_BSX: Tensor) -> Tensor:
        """Return a mask (B, S) of the tokens of the text, without learned tokens and padding."""
        counted_BS = torch.ones(x_BSX.shape[:2], dtype=torch.bool, device=x_BSX.device)
        counted_BS[:, : self._leading] = False
        if self._mask_BT is not None and self._mask_BT.shape == counted_BS.shape:
            counted_BS &= self._mask_BT.to(counted_BS.device)
        return counted_BS

    @torch.no_grad()
    def observe(self, layer: LayerCall) -> None:
        """Read the attention matrix of a call in blocks of queries."""
        call = layer.call
        B, H, T, D = call.q_BHTD.shape
        S, G = call.k_BGTD.shape[2], call.k_BGTD.shape[1]
        counted_BS = self._counted(call.k_BGTD[:, 0])
        at_BS = torch.arange(S, device=counted_BS.device).expand(B, S)
        begins_BS = at_BS == 0
        if self._packed_BT is not None and self._packed_BT.shape[1] == S == T:
            separate_BS = visible_keys(call.mask, T, at_BS.device)[:, 0] == 1  # the first token sees no other sequence
            begins_BS = begins_BS | (self._packed_BT.diff(prepend=self._packed_BT[:, :1]).bool() & separate_BS)
        number_BS = begins_BS.flatten().cumsum(0).view(B, S) - 1  # of the sequence of each position
        number_BT, counted_BT = (x_BS[:, S - T :] for x_BS in (number_BS, counted_BS))
        count_N = number_BT[counted_BT].bincount(minlength=int(number_BS.max()) + 1)
        first_N = torch.full_like(count_N, S).scatter_reduce(0, number_BS[counted_BS], at_BS[counted_BS], "amin")
        first_BT = first_N[number_BT]
        scale = D**-0.5 if call.scale is None else call.scale
        share_BHT = call.q_BHTD.new_zeros(B, H, T, dtype=torch.float32)
        entropy_BHT, bias_BHT = torch.zeros_like(share_BHT), torch.zeros_like(share_BHT)
        logit_H = share_BHT.new_full((H,), -torch.inf)
        for rows in layer.rows():
            queries, keys = rows.block.rows, rows.block.keys
            weights_BHQK = rows.weights_BHQS
            first_BQ, (start, stop, _) = first_BT[:, queries], keys.indices(S)
            at_BHQ1 = (first_BQ - start).clamp(0, stop - start - 1)[:, None, :, None].expand(-1, H, -1, 1)
            inside_B1Q = ((first_BQ >= start) & (first_BQ < stop))[:, None]
            share_BHT[:, :, queries] = weights_BHQK.gather(-1, at_BHQ1)[..., 0] * inside_B1Q
            entropy_BHT[:, :, queries] = torch.special.entr(weights_BHQK.clamp(min=0)).sum(-1)
            if rows.bias_BHQ is not None:
                bias_BHT[:, :, queries] = rows.bias_BHQ
            k_BHKD = call.k_BGTD[:, :, keys].repeat_interleave(H // G, 1)
            z_BHQK = call.q_BHTD[:, :, queries] @ k_BHKD.mT * scale
            seen_BHQK = (weights_BHQK > 0) & counted_BT[:, None, queries, None]
            logit_H = torch.maximum(logit_H, z_BHQK.float().masked_fill(~seen_BHQK, -torch.inf).amax((0, 2, 3)))

        def mean(x_BHT: Tensor) -> Tensor:  # over the queries of each sequence, (N, H)
            sums_NH = x_BHT.new_zeros(len(count_N), H)
            sums_NH.index_add_(0, number_BT[counted_BT], x_BHT.transpose(1, 2)[counted_BT])
            return (sums_NH / count_N[:, None])[count_N > 0]  # padding may begin like a sequence

        self.shares[layer.index].append(mean(share_BHT).cpu())
        self.entropies[layer.index].append(float(mean(entropy_BHT).mean()))
        self.logits[layer.index].append(logit_H.cpu())
        if bias_BHT.any():
            self.biases.append(float(mean(bias_BHT).mean()))


@torch.no_grad()
def _activations(h_BTC: Tensor) -> tuple[float, float, float, int]:
    """Return largest |h|, its ratio to the median, the kurtosis over channels, and the channel of the largest |h|."""
    size = h_BTC.float().abs()
    largest = float(size.max())
    middle = float(size.flatten().median())
    channel = int(size.amax((0, 1)).argmax())
    return largest, largest / middle if middle > 0 else 0.0, float(kurtosis(h_BTC.float()).mean()), channel


class LoggingCallback(TrainerCallback):
    """A callback that adds numbers to the log of a Trainer.

    The Trainer calls its W&B and TensorBoard callbacks before those of the user, and they miss what is added later.
    """

    def goes_first(self, trainer: "Trainer") -> None:
        """Move this callback before all other callbacks of the trainer, so that they log its numbers.

        Raises:
            InputError: if the trainer does not have this callback.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            name = type(self).__name__
            raise InputError(f"the trainer does not have this {name}: pass it as Trainer(callbacks=[..]) first")
        callbacks.remove(self)
        callbacks.insert(0, self)


class MonitorCallback(LoggingCallback):
    """Adds the numbers of a `Monitor` to the log of a Trainer, at the step at which they were recorded.

    The Trainer logs at these steps too; its loss is then the mean since the log before.
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._block: Any = None
        self._numbers = dict[str, float]()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the record of a step."""
        self._block = self.monitor(state.global_step)
        self._numbers = self._block.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """End the record of a step, and have the Trainer log."""
        if self._block is not None:
            self._block.__exit__(None, None, None)
            self._block = None
            control.should_log = control.should_log or bool(self._numbers)
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the numbers to the Trainer's log and to the last entry of its history."""
        if logs is not None and self._numbers:
            logs.update(self._numbers)
            if state.log_history:
                state.log_history[-1].update(self._numbers)
            self._numbers = {}
