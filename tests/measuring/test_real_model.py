"""SmolLM2-135M-Instruct, measured by `sinklab measure FILE.gguf` and by an eager loop written from the definitions.

The reference shares nothing with sinklab: transformers reads the file, the text is cut here, and attention is computed
here as whole matrices, from which alpha[l, h, k] = mean over t = k .. T of A[l, h, t, k].
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_gguf import needed
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import sinklab
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options, Study
from sinklab.survey.measure_one import measure_model
from sinklab.survey.request import Request

pytestmark = pytest.mark.real
EPS, SEQUENCES, LENGTH = 0.3, 100, 64
FLIPPED = 4 / (SEQUENCES * 30 * 9) * 100
"""Percent: so many of the 27,000 shares may lie within rounding of eps."""


@dataclass
class Reference:
    """By layer, as the calls come: alpha (N, H, T), cosines (N, H, T), |k| (N, T); and hidden states (N, T, width)."""

    alpha: list[Tensor] = field(default_factory=list)
    cosine: list[Tensor] = field(default_factory=list)
    key_norm: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    loss: float = 0.0

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        """Softmax attention, whole matrices; q is (N, H, T, d), k and v have fewer heads, each for a group of q's."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        T = q.shape[2]
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        A = (q @ k.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).transpose(-1, -2)
        self.alpha.append(torch.stack([A[:, :, t:, t].mean(-1) for t in range(T)], -1))
        self.cosine.append(torch.stack([cosines[:, :, t:, t].mean(-1) for t in range(T)], -1))
        self.key_norm.append(k.norm(dim=-1).mean(1))
        return (A @ v).transpose(1, 2), None

    def rates(self) -> Tensor:
        """(T,) percent of (sequence, layer, head) with alpha above eps."""
        return 100 * (torch.stack(self.alpha) > EPS).float().mean((0, 1, 2))

    def secondary(self) -> float:
        """Percent of them with alpha above eps at some position 5 .. T / 2."""
        alpha = torch.stack(self.alpha)
        return 100 * float((alpha[..., 4 : alpha.shape[-1] // 2] > EPS).any(-1).float().mean())


def reference(model: Any, tokens: Tensor) -> Reference:
    """All sequences, few at a time: the logits of a sequence take 12 MB."""
    parts = [few(model, part) for part in tokens.split(10)]

    def joined(name: str) -> list[Tensor]:
        return [torch.cat(layer) for layer in zip(*(getattr(part, name) for part in parts), strict=True)]

    loss = sum(part.loss * len(part.hidden[0]) for part in parts) / len(tokens)
    return Reference(joined("alpha"), joined("cosine"), joined("key_norm"), joined("hidden"), loss)


@torch.no_grad()
def few(model: Any, tokens: Tensor) -> Reference:
    found = Reference()
    AttentionInterface.register("by_hand", found.attention)  # type: ignore[arg-type]
    AttentionMaskInterface.register("by_hand", eager_mask)
    model.set_attn_implementation("by_hand")
    try:
        output = model(tokens, use_cache=False, output_hidden_states=True)
    finally:
        model.set_attn_implementation("eager")
        AttentionInterface._global_mapping.pop("by_hand")
        AttentionMaskInterface._global_mapping.pop("by_hand")
    found.hidden = list(output.hidden_states[:-1])  # the last one has passed the final norm
    log_p = output.logits[:, :-1].log_softmax(-1)
    found.loss = -float(log_p.gather(-1, tokens[:, 1:, None]).double().mean())
    return found


def first_to_rest(norm_NT: Tensor) -> float:
    """The norm of position 1 over the mean of the others', each a mean over sequences."""
    norm_T = norm_NT.mean(0)
    return float(norm_T[0] / norm_T[1:].mean())


@pytest.fixture(scope="module")
def file(data_dir: Path) -> Path:
    needed()
    found = sorted((data_dir / "models" / "SmolLM2-135M-Instruct").glob("*.gguf"))
    if not found:
        pytest.skip(f"no SmolLM2-135M-Instruct in {data_dir / 'models'}: put its .gguf file there")
    return found[0]


@pytest.fixture(scope="module")
def text(data_dir: Path) -> Path:
    return data_dir / "domains" / "c4_web.jsonl"


@pytest.fixture(scope="module")
def model(file: Path) -> Any:
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "eager"}
    return hf.AutoModelForCausalLM.from_pretrained(file.parent, **options).eval()


@pytest.fixture(scope="module")
def natural(file: Path, text: Path) -> Tensor:
    """The first LENGTH tokens of the first documents that have so many."""
    tokenizer = hf.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    rows = (json.loads(line)["text"] for line in text.open(encoding="utf-8"))
    ids = (tokenizer(row, add_special_tokens=False).input_ids for row in rows)
    return torch.tensor([row[:LENGTH] for row in ids if len(row) >= LENGTH][:SEQUENCES])


@pytest.fixture(scope="module")
def expected(model: Any, natural: Tensor) -> Reference:
    return reference(model, natural)


@pytest.fixture(scope="module")
def measured(file: Path, text: Path) -> Measurement:
    return measure_model(str(file), text, Request(options=Options(details=True), sequences=SEQUENCES, length=LENGTH))


def test_sink_rates_are_those_of_the_definition(measured: Measurement, expected: Reference) -> None:
    np.testing.assert_allclose(measured.sink_rate, expected.rates().tolist(), atol=FLIPPED, rtol=0)
    first = torch.stack(expected.alpha, 1)[..., 0].numpy()
    np.testing.assert_allclose(measured.importance_first, first, atol=1e-3)
    assert measured.loss == pytest.approx(expected.loss, rel=1e-5)


def test_so_are_the_angles_norms_and_secondary_sinks(measured: Measurement, expected: Reference) -> None:
    assert measured.details is not None
    cosine = measured.details.cosine
    assert cosine is not None
    np.testing.assert_allclose(cosine, torch.stack(expected.cosine).mean(1).numpy(), atol=1e-3)
    assert measured.key_norm_ratio == pytest.approx([first_to_rest(norm) for norm in expected.key_norm], rel=1e-3)
    ratios = [first_to_rest(hidden.norm(dim=-1)) for hidden in expected.hidden]
    assert measured.hidden_norm_ratio is not None
    assert measured.hidden_norm_ratio[: len(ratios)] == pytest.approx(ratios, rel=1e-3)
    assert measured.details.secondary_rate == pytest.approx(expected.secondary(), abs=FLIPPED)


def test_the_massive_activation_is_in_channel_507_of_the_first_token(
    measured: Measurement, expected: Reference
) -> None:
    assert measured.massive_activations is not None
    top = measured.massive_activations[0]
    first_sequence = expected.hidden[top.layer][0].abs()
    assert (top.position, top.dimension) == (1, 507)
    assert abs(top.value) == pytest.approx(float(first_sequence.max()), rel=1e-4)
    assert top.ratio_to_median == pytest.approx(float(first_sequence.max() / first_sequence.median()), rel=1e-3)


def test_its_massive_activation_can_be_taken_away_and_the_sink_moves_where_the_first_key_is_hidden(
    file: Path, text: Path
) -> None:
    names = ("mask_first:1", "zero_massive", "zero_massive:2")
    measured = measure_model(str(file), text, Request(sequences=10, length=LENGTH, study=Study(ablate=names)))
    hidden, removed, once = measured.ablations or []
    assert hidden.sink_rate_after == 0
    assert hidden.sink_max_position_after == 2
    assert hidden.sink_max_after == pytest.approx(hidden.sink_rate_before, rel=0.1)
    assert removed.what.startswith("dimension 507 at position 1 is zeroed after layers 2 to 30")
    assert (removed.still_massive, once.still_massive) == (False, True)
    assert once.largest_after is not None
    assert (once.largest_after.layer, once.largest_after.dimension) == (12, 507)  # which layer 12 writes anew


@pytest.mark.parametrize(("inputs", "low", "high"), [("random", 70, 83), ("repeat", 0, 0)])
def test_random_tokens_have_the_sink_and_a_repeated_one_has_not(
    model: Any, inputs: str, low: float, high: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.config.vocab_size, (20, LENGTH if inputs == "random" else 1), generator=generator)
    tokens = tokens.expand(-1, LENGTH).contiguous()
    found, by_hand = sinklab.measure(model, tokens), reference(model, tokens)
    np.testing.assert_allclose(found.sink_rate, by_hand.rates().tolist(), atol=5 * FLIPPED, rtol=0)
    assert low <= found.sink_rate[0] <= high
