"""The training parts of a recipe: optimiser, schedule, loop, metric."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from sinklab.schema import LARGEST, Part

Fraction = Annotated[float, Field(ge=0, lt=1)]
Parallel = Literal["ddp", "fsdp"]
Recompute = Literal["none", "blocks"]

Betas = Annotated[tuple[Fraction, Fraction], Field(description="decay of AdamW's two moments")]
Clip = Annotated[float | None, Field(gt=0, description="largest global gradient norm; null: no clipping")]


class AdamW(Part):
    """AdamW with decoupled weight decay on every parameter, as in the paper (2410.10781)."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate")
    betas: Betas = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled: w -= lr * weight_decay * w")
    clip: Clip = 1.0


class Sgd(Part):
    """SGD: m = momentum m + g + weight_decay w, then w -= lr m."""

    name: Literal["sgd"] = "sgd"
    lr: float = Field(default=0.1, gt=0, description="peak learning rate")
    momentum: float = Field(default=0.9, ge=0, lt=1, description="share of the last step that is kept")
    nesterov: bool = Field(default=False, description="w -= lr (g + weight_decay w + momentum m) instead")
    weight_decay: float = Field(default=0.0, ge=0, description="coupled: added to the gradient, unlike AdamW's")
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
    lr: float = Field(default=4e-4, gt=0, description="peak learning rate, of Muon and AdamW alike")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="of Muon")
    betas: Betas = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0, description="of AdamW")
    weight_decay: float = Field(default=0.1, ge=0, description="decoupled: w -= lr * weight_decay * w")
    clip: Clip = 1.0


OptimConfig = Annotated[AdamW | Sgd | Muon, Field(discriminator="name")]


class ScheduleConfig(Part):
    """Learning rate against step: linear warm-up to `optim.lr`, then one of three shapes."""

    shape: Literal["flat", "cosine", "wsd"] = Field(
        default="cosine",
        description="flat; cosine down to min_lr; wsd: flat, then linear to min_lr over the last decay_fraction",
    )
    warmup_steps: int = Field(default=100, ge=0, description="steps in which the rate rises to optim.lr")
    min_lr: float = Field(default=0.0, ge=0, description="where cosine and wsd end")
    decay_fraction: float = Field(default=0.2, ge=0, le=1, description="share of all steps in which wsd decays")


class TrainConfig(Part):
    """The loop. A step is one update on `batch_size` sequences of `model.context` tokens."""

    steps: int = Field(default=20000, ge=1)
    batch_size: int = Field(default=512, ge=1, le=LARGEST, description="sequences per step")
    micro_batch: int | None = Field(default=None, ge=1, description="sequences at a time; gradients are accumulated")
    eval_every: int = Field(default=1000, ge=1)
    eval_sequences: int = Field(default=256, ge=1, description="validation sequences for the loss")
    save_every: int = Field(default=1000, ge=1)
    keep: int = Field(default=2, ge=1, description="checkpoints kept")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        default="fp32",
        description="bf16: autocast, weights stay float32; auto: bf16 where the device multiplies it natively",
    )
    float32_matmul: Literal["highest", "high"] = Field(
        default="highest",
        description="products of float32 matrices in an update on CUDA: in float32, or (high) in TF32. Under bf16 "
        "those of the delta rule and of linear kernels",
    )
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    parallel: Parallel = Field(
        default="ddp",
        description="how the processes of torchrun share the work: ddp, whole models; fsdp, sharded ones. One process "
        "needs neither",
    )
    compile: Literal["auto", "on", "off"] = Field(
        default="auto", description="torch.compile around the attention cores; auto: on CUDA"
    )
    recompute: Recompute = Field(
        default="none",
        description="blocks: activations are not kept but computed again in the backward pass, block by block",
    )
    peak_flops: float | None = Field(
        default=None, gt=0, description="of one card, for the utilisation; default: from a table"
    )

    @field_validator("compile", mode="before")
    @classmethod
    def _on_and_off_are_no_booleans(cls, value: Any) -> Any:
        """YAML 1.1 reads them as such."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _whole_micro_batches(self) -> Self:
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch {self.micro_batch}")
        return self


class MetricConfig(Part):
    """The sink metric of every evaluation (2410.10781, section 3.2)."""

    eps: float = Field(default=0.3, gt=0, lt=1, description="a position is a sink where its importance exceeds this")
    sequences: int = Field(default=100, ge=1)
    length: int = Field(default=64, ge=2, description="tokens per sequence, BOS included")
