"""Training sections of a recipe: optimiser, schedule, training loop, sink metric."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sinklab.schema import LARGEST, Part

Fraction = Annotated[float, Field(ge=0, lt=1)]
Parallel = Literal["ddp", "fsdp"]
Recompute = Literal["none", "blocks"]
Compile = Literal["auto", "on", "off", "loss"]

Clip = Annotated[float | None, Field(gt=0, description="maximum global gradient norm; null: no clipping")]


class AdamW(Part):
    """AdamW. Weight decay applies to all parameters, including norms, as in the paper's code (2410.10781)."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate")
    betas: tuple[Fraction, Fraction] = Field(default=(0.9, 0.95), description="AdamW's beta_1 and beta_2")
    eps: float = Field(default=1e-8, gt=0, description="AdamW's epsilon, added to the square root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled: w -= lr * weight_decay * w")
    clip: Clip = 1.0


class Sgd(Part):
    """SGD with momentum, for gradients g and weights w: m = momentum * m + g + weight_decay * w, then w -= lr * m."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0, description="peak learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum factor")
    nesterov: bool = Field(default=False, description="w -= lr * (g + weight_decay * w + momentum * m)")
    weight_decay: float = Field(
        default=0.0, ge=0, description="coupled weight decay (L2): weight_decay * w is added to the gradient"
    )
    clip: Clip = 1.0

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov requires a momentum greater than 0")
        return self


class Muon(AdamW):
    """Muon for the linear layers of the blocks and `model.embedding: projected`, AdamW for all other parameters.

    The update of a matrix is the orthogonalised Nesterov momentum of its gradient (torch.optim.Muon, five Newton-Schulz
    iterations). The factor 0.2 * sqrt(max(rows, columns)) gives it the RMS of AdamW's updates (2502.16982), so that
    Muon and AdamW share learning rate and weight decay. A fused projection, such as QKV, is one matrix.
    """

    name: Literal["muon"] = "muon"  # type: ignore[assignment]  # parts are immutable
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate of both Muon and AdamW")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Muon's momentum")


class OrthoAdam(AdamW):
    """AdamW with moments of rotated gradients (OrthoAdam, 2410.17174, algorithm 1).

    The gradient is multiplied by a fixed random orthogonal matrix per axis of the parameter, and the step by its
    transpose. Axes longer than 4,096, such as that of a large vocabulary, are not rotated. Weight decay is AdamW's.
    """

    name: Literal["ortho_adam"] = "ortho_adam"  # type: ignore[assignment]


OptimConfig = Annotated[AdamW | Sgd | Muon | OrthoAdam, Field(discriminator="name")]


class ScheduleConfig(Part):
    """Learning-rate schedule: linear warm-up to `optim.lr`, then one of three shapes."""

    shape: Literal["flat", "cosine", "wsd"] = Field(
        default="cosine",
        description="flat: constant; cosine: decay to min_lr; wsd: constant, then linear decay to min_lr",
    )
    warmup_steps: int = Field(default=100, ge=0, description="number of linear warm-up steps")
    min_lr: float = Field(default=0.0, ge=0, description="learning rate of cosine and wsd after the last step")
    decay_fraction: float = Field(default=0.2, ge=0, le=1, description="decay phase of wsd, as a fraction of all steps")


class TrainConfig(Part):
    """Settings of the training loop. A step is one update on `batch_size` sequences of `model.context` tokens.

    The model is evaluated at step 0, every `eval_every` steps and after the last step. Checkpoints are saved every
    `save_every` steps, after the last step and when training is stopped.
    """

    steps: int = Field(default=20000, ge=1)
    batch_size: int = Field(default=512, ge=1, le=LARGEST, description="global batch size, over all processes")
    micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="micro-batch size of a process, for gradient accumulation; null: no accumulation",
    )
    eval_every: int = Field(default=1000, ge=1)
    eval_sequences: int = Field(
        default=256,
        ge=1,
        description="number of validation sequences for the loss; raised to metric.sequences, limited by the text",
    )
    save_every: int = Field(default=1000, ge=1)
    keep: int = Field(default=2, ge=1, description="number of newest checkpoints to keep")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="fp32",
        description="bf16: autocast, weights stay float32; auto: bf16 if the device supports it natively, else fp32",
    )
    float32_matmul: Literal["highest", "high"] = Field(
        default="highest",
        description="precision of float32 matmuls in training on CUDA: highest is float32, high is TF32. Under bf16, "
        "the delta rule, kernels and the logits of bias keys still use float32 matmuls",
    )
    device: str = Field(default="auto", description="auto (CUDA if available), cpu, cuda or cuda:N")
    parallel: Parallel = Field(
        default="ddp",
        description="data parallelism over torchrun processes: ddp replicates the model, fsdp shards it; ignored with "
        "one process",
    )
    compile: Compile = Field(
        default="auto",
        description="torch.compile. on: compile each block before and after its attention core; auto: as on, but only "
        "on CUDA; loss: compile the whole training loss on one CPU process with a C++ compiler (faster in bf16), "
        "otherwise as auto",
    )
    recompute: Recompute = Field(
        default="none",
        description="blocks: activation checkpointing per block; none: store all activations",
    )
    peak_flops: float | None = Field(
        default=None,
        gt=0,
        description="peak FLOP/s of one device, for the MFU and --dry-run; null: bfloat16 peak of the GPU if known",
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _on_and_off_are_no_booleans(cls, value: Any) -> Any:
        """Convert booleans back to "on" and "off", which YAML 1.1 parses as booleans."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        return self


class MetricConfig(Part):
    """Settings of the sink metric (2410.10781, section 3.2), for evaluations and the final measurement.

    The metric is computed on the first `length` tokens of the first `sequences` validation sequences.
    """

    eps: float = Field(
        default=0.3, gt=0, lt=1, description="threshold: a position is a sink if its importance exceeds it"
    )
    sequences: int = Field(default=100, ge=1)
    length: int = Field(default=64, ge=2, description="tokens per sequence, BOS included")
