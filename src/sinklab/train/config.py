"""The training parts of a recipe: optimiser, schedule, loop, metric."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sinklab.schema import LARGEST, Part

Fraction = Annotated[float, Field(ge=0, lt=1)]
Parallel = Literal["ddp", "fsdp"]
Recompute = Literal["none", "blocks"]

Betas = Annotated[tuple[Fraction, Fraction], Field(description="decay rates of AdamW's two moments")]
Clip = Annotated[float | None, Field(gt=0, description="maximum global gradient norm; null: no clipping")]


class AdamW(Part):
    """AdamW with decoupled weight decay on every parameter, as in the paper (2410.10781)."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate")
    betas: Betas = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="number added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled: w -= lr * weight_decay * w")
    clip: Clip = 1.0


class Sgd(Part):
    """SGD: m = momentum m + g + weight_decay w, then w -= lr m."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0, description="peak learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="momentum factor")
    nesterov: bool = Field(default=False, description="w -= lr (g + weight_decay w + momentum m) instead")
    weight_decay: float = Field(
        default=0.0, ge=0, description="coupled weight decay: added to the gradient, unlike AdamW's"
    )
    clip: Clip = 1.0

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self


class Muon(Part):
    """Muon for the matrices inside the blocks and the projections of embeddings, AdamW for all other weights.

    A matrix, as it is stored (queries, keys and values are one), moves along the orthogonalised Nesterov momentum of
    its gradient (torch.optim.Muon, five Newton-Schulz iterations), scaled by 0.2 sqrt(max(rows, columns)): the update
    then has AdamW's size (2502.16982), and one learning rate and weight decay serve both.
    """

    name: Literal["muon"] = "muon"
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate of both Muon and AdamW")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="momentum of Muon")
    betas: Betas = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="AdamW: number added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled: w -= lr * weight_decay * w")
    clip: Clip = 1.0


OptimConfig = Annotated[AdamW | Sgd | Muon, Field(discriminator="name")]


class ScheduleConfig(Part):
    """Learning-rate schedule: linear warm-up to `optim.lr`, then one of three shapes."""

    shape: Literal["flat", "cosine", "wsd"] = Field(
        default="cosine",
        description="flat; cosine down to min_lr; wsd: flat, then linear to min_lr over the last decay_fraction",
    )
    warmup_steps: int = Field(
        default=100, ge=0, description="warm-up steps, in which the learning rate rises to optim.lr"
    )
    min_lr: float = Field(default=0.0, ge=0, description="final learning rate of cosine and wsd")
    decay_fraction: float = Field(default=0.2, ge=0, le=1, description="fraction of all steps in which wsd decays")


class TrainConfig(Part):
    """The training loop. A step is one update on `batch_size` sequences of `model.context` tokens."""

    steps: int = Field(default=20000, ge=1)
    batch_size: int = Field(default=512, ge=1, le=LARGEST, description="sequences per step")
    micro_batch: int | None = Field(
        default=None, ge=1, description="sequences per forward pass; gradients are accumulated"
    )
    eval_every: int = Field(default=1000, ge=1)
    eval_sequences: int = Field(default=256, ge=1, description="number of validation sequences for the loss")
    save_every: int = Field(default=1000, ge=1)
    keep: int = Field(default=2, ge=1, description="number of checkpoints to keep")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="fp32",
        description="bf16: autocast, weights stay float32; auto: bf16 if the device supports it natively",
    )
    float32_matmul: Literal["highest", "high"] = Field(
        default="highest",
        description="precision of float32 matrix products in an update on CUDA: float32, or (high) TF32. Under bf16, "
        "only the delta rule and linear kernels use them",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    parallel: Parallel = Field(
        default="ddp",
        description="how torchrun processes share the work: ddp replicates the model, fsdp shards it. A single process "
        "uses neither",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="torch.compile around the attention cores; auto: on CUDA"
    )
    recompute: Recompute = Field(
        default="none",
        description="blocks: recompute activations in the backward pass, block by block, instead of storing them",
    )
    peak_flops: float | None = Field(
        default=None, gt=0, description="peak FLOP/s of one card, for the utilisation; default: from a table"
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _on_and_off_are_no_booleans(cls, value: Any) -> Any:
        """YAML 1.1 parses `on` and `off` as booleans."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        return self


class MetricConfig(Part):
    """The sink metric of every evaluation (2410.10781, section 3.2)."""

    eps: float = Field(
        default=0.3, gt=0, lt=1, description="threshold: a position is a sink if its importance exceeds it"
    )
    sequences: int = Field(default=100, ge=1)
    length: int = Field(default=64, ge=2, description="tokens per sequence, BOS included")
