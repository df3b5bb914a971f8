"""Data section of a recipe."""

from importlib import resources
from typing import Literal, Self

import yaml
from pydantic import Field, field_validator, model_validator

from sinklab.data.corpora import WORDS, installed_names, parse
from sinklab.data.tokenizers import trained_size
from sinklab.schema import Omitted, Part


def paper_weights() -> dict[str, float]:
    """Load the weights of the 17 domains of the corpus of 2410.10781 (data/regmix.yaml), by domain."""
    return yaml.safe_load((resources.files("sinklab") / "data" / "regmix.yaml").read_text(encoding="utf-8"))


class WeightedMix(Part):
    """Interleave domains with token shares proportional to their weights, until the first domain is exhausted."""

    kind: Literal["weights"] = "weights"
    weights: dict[str, float] = Field(
        default_factory=paper_weights,
        min_length=1,
        description="positive weight of each domain, divided by the sum of all; default: the weights of 2410.10781",
    )
    seed: int = Field(default=0, ge=0, description="random seed of the interleaving")
    absent: Literal["refuse", "renormalise"] = Field(
        default="refuse",
        description="if a domain has no file: raise an error, or drop the domain and renormalise the other weights",
    )

    @model_validator(mode="after")
    def _weights_are_positive(self) -> Self:
        if bad := [name for name, weight in self.weights.items() if not 0 < weight < float("inf")]:
            raise ValueError(f"weights.{bad[0]} is {self.weights[bad[0]]}: weights must be positive and finite")
        return self


class UniformMix(Part):
    """Interleave all files at equal token rates, as in the code of 2410.10781, until all files are exhausted."""

    kind: Literal["files"] = "files"
    seed: int = Field(default=0, ge=0, description="random seed of the interleaving")


Mix = WeightedMix | UniformMix


class Selection(Part):
    """Mix and token limit. Null fields are not serialised, so they do not affect the name of the cache folder."""

    mix: Omitted[Mix] = Field(
        default=None,
        discriminator="kind",
        description="interleaving of the files of a folder or dataset; null: files are read sequentially",
    )
    token_limit: Omitted[int] = Field(
        default=None,
        ge=2,
        description="maximum number of tokens in both shards together; the last document is truncated",
    )


class FixedToken(Part):
    """Replace the tokens at given positions of every chunk by a fixed token (2410.10781, section 5: `x[p] = token`)."""

    token_id: int = Field(default=1, ge=0, description="id of the token, below the vocabulary size")
    positions: list[int] = Field(min_length=1, description="0-based positions in a chunk, which has context + 1 tokens")

    @field_validator("positions")
    @classmethod
    def _distinct_and_not_negative(cls, positions: list[int]) -> list[int]:
        if min(positions) < 0 or len(set(positions)) < len(positions):
            raise ValueError(f"positions must be distinct and 0-based, such as [0, 1, 2]; got {positions}")
        return positions


class RandomTokens(Part):
    """Replace the tokens at 0-based positions [start, end) of every chunk by uniformly random tokens.

    A chunk has the same random tokens in every epoch.
    """

    start: int = Field(ge=0, description="first replaced position, 0-based")
    end: int = Field(ge=1, description="end of the replaced range, exclusive")

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.end <= self.start:
            raise ValueError(f"end must be greater than start; got {self.start}..{self.end}")
        return self


class DataConfig(Selection):
    """Text source, tokenizer, validation split and data interventions."""

    source: str = Field(
        default="stdlib",
        min_length=1,
        description="`stdlib`, `site-packages`, `stdlib+site-packages`, a text file (.txt, .md, .jsonl, .json, .csv, "
        ".tsv or .parquet, also .gz, .zst, .bz2 or .xz), a folder of them, a "
        "directory written by `sinklab data prepare` (tokenizer, valid_fraction, text_limit_bytes, token_limit and mix "
        "are then ignored), `hf:NAME[:CONFIG[:SPLIT]]`, or "
        "`synthetic:NAME[:length=N,documents=N,seed=N]` with NAME bigram_backcopy or trigger_average",
    )
    tokenizer: str = Field(
        default="train:1024",
        min_length=1,
        description="Hugging Face name or path, `train:SIZE` for a byte-level BPE trained on the corpus, or `words` "
        "for a synthetic source",
    )
    valid_fraction: float = Field(
        default=0.02,
        gt=0,
        le=0.5,
        description="expected fraction of the documents that are held out for validation, at most 0.5",
    )
    text_limit_bytes: int | None = Field(
        default=None, ge=1, description="maximum number of bytes of UTF-8 text to read"
    )
    bos: bool = Field(default=False, description="begin every chunk with BOS (EOS if the tokenizer has none)")
    fixed_token: FixedToken | None = None
    random_tokens: RandomTokens | None = None
    token_budget: int | None = Field(
        default=None, ge=1, description="number of tokens of the training shard to use, from its start; null: all"
    )

    @field_validator("tokenizer")
    @classmethod
    def _size_is_possible(cls, tokenizer: str) -> str:
        trained_size(tokenizer)
        return tokenizer

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if (parse(self.source) is not None) != (self.tokenizer == WORDS):
            raise ValueError(
                f"source {self.source} with tokenizer {self.tokenizer}: sources synthetic:NAME "
                f"require the tokenizer {WORDS}, and other sources require another tokenizer"
            )
        if self.mix is not None and (installed_names(self.source) or parse(self.source)):
            raise ValueError(
                f"source {self.source} cannot be mixed: mix requires a folder or hub dataset (hf:NAME) with one "
                "file or subfolder per domain"
            )
        fixed = self.fixed_token.positions if self.fixed_token else ()
        drawn = range(self.random_tokens.start, self.random_tokens.end) if self.random_tokens else range(0)
        if both := [position for position in fixed if position in drawn]:
            raise ValueError(f"fixed_token and random_tokens both replace position {min(both)}: use disjoint positions")
        if self.bos and (0 in fixed or 0 in drawn):
            raise ValueError("position 0 is BOS: set bos: false, or start fixed_token and random_tokens at position 1")
        return self
