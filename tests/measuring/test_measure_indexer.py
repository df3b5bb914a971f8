"""DeepSeek-V3.2: an indexer selects the keys of every query; attention, loss and visible keys are those of its code."""

from typing import Any

import pytest
import torch
import transformers as hf
from closeness import assert_close
from families import LATENT
from hidden_keys_reference import scores_without_first_keys
from torch import Tensor

from sinklab.measuring.surgery import masked_first_keys
from sinklab.report.result_tables import layers_table
from sinklab.survey.api import measure

T, CHOSEN = 20, 5
TOKENS = torch.randint(3, 64, (3, T), generator=torch.Generator().manual_seed(1))


def made(chosen: int) -> Any:
    torch.manual_seed(0)
    config = hf.DeepseekV32Config(
        **LATENT,
        index_topk=chosen,
        index_head_dim=8,
        index_n_heads=2,
    )
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return made(CHOSEN)


@torch.no_grad()
def _own(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Matrices (L, N, H, T, T), which keys are selected (L, N, T, T), and the loss, of the model's eager code."""
    chosen: list[Tensor] = []
    handles = [
        block.self_attn.indexer.register_forward_hook(lambda _, __, out: chosen.append(out.long()))
        for block in model.model.layers
    ]
    output = model(TOKENS, labels=TOKENS, output_attentions=True)
    for handle in handles:
        handle.remove()
    selected = torch.stack([torch.zeros(3, T, T).scatter(-1, one, 1.0).tril() for one in chosen])
    return torch.stack(output.attentions), selected, output.loss


@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_query_attends_to_the_selected_keys_alone(model: Any, batch_size: int | None) -> None:
    matrices, selected, loss = _own(model)
    found = measure(model, TOKENS, details=True, batch_size=batch_size)
    importance = torch.stack([matrices[..., key:, key].mean(-1) for key in range(T)], -1).mean(1)
    assert_close(found.importance, importance)
    assert found.loss == pytest.approx(float(loss), rel=1e-5)
    assert found.details is not None
    first, rest = found.details.first_visible, found.details.rest_visible
    assert first is not None
    assert rest is not None
    for bucket, (start, stop) in enumerate([(1, 2), (2, 4), (4, 8), (8, 16), (16, T + 1)]):
        queries = range(start - 1, stop - 1)
        expected = torch.stack([selected[:, :, t, 0].mean(1) for t in queries]).mean(0)
        others = torch.stack([selected[:, :, t, 1:].sum(-1).mean(1) / max(t, 1) for t in queries]).mean(0)
        assert_close(first[:, :, bucket], expected[:, None].expand(-1, 4))
        assert_close(rest[:, :, bucket], others[:, None].expand(-1, 4))
    share = selected[..., 0].mean((1, 2))  # of all queries of a layer
    assert_close(found.details.first_visible_by_head, share[:, None].expand(-1, 4))
    assert found.details.by_layer["first_visible_by_layer"] == pytest.approx(share.tolist(), rel=1e-6)
    table = layers_table([("", found)])
    place = [column.title for column in table.columns].index("sees key 1")
    assert [row[place] for row in table.rows[1:]] == [f"{one:.2f}" for one in share.tolist()]
    assert (first[..., :2] == 1).all()  # up to CHOSEN keys all are selected
    assert first[..., 3:].mean() < 1


def test_shares_of_selected_keys_are_not_reported_for_sequences_with_all_keys_selected(model: Any) -> None:
    details = measure(model, TOKENS[:, :CHOSEN], details=True).details
    assert details is not None
    assert details.first_visible is None
    assert details.rest_visible is None
    assert details.by_layer["first_visible_by_layer"] is None


@torch.no_grad()
def test_first_keys_are_hidden_in_attention_whose_indexer_selects_all_keys() -> None:
    dense = made(chosen=T)
    with scores_without_first_keys(2, T):
        expected = dense(TOKENS).logits
    with masked_first_keys(dense, 2):
        assert_close(dense(TOKENS).logits, expected)
    found = measure(dense, TOKENS, ablate=["mask_first:1"], perturb=3)
    assert found.ablations is not None
    assert found.mixing is not None
