"""Check measurements of a small random model of every causal architecture of the installed transformers.

    python -m benchmarks.architectures [MODEL_TYPE ...] [--save]

The importance of every position, layer and head is compared with that from the attention matrices that the model
returns with `output_attentions`. The outcome is "agrees" if the largest difference is at most 1e-4, else "differs";
"refused" if sinklab raises an error that says why the model cannot be measured; "fails" for any other error; and "not
compared" without a small model, or without matrices of all measured layers. Sink logits are set to -30, because some
models (GraniteSWA) return the matrices from before sink logits are applied.
"""

import argparse
import inspect
import warnings
from collections import Counter
from typing import Any

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import sinklab
from benchmarks.timing import RESULTS, environment
from sinklab.errors import SinklabError
from sinklab.files import write_json

SEQUENCES, LENGTH, LAYERS, HEADS = 3, 16, 4, 4
CLOSE = 1e-4
MOST_PARAMETERS = 20e6
NO_SINK = -30.0

SMALL: dict[str, Any] = {
    name: value
    for value, names in (
        (32, "hidden_size n_embd d_model embedding_size lru_width word_embed_proj_dim"),
        (48, "intermediate_size ffn_dim d_ff ffn_hidden_size decoder_ffn_dim encoder_ffn_dim"),
        (64, "vocab_size vocab_size_per_layer_input max_position_embeddings n_positions"),
        (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers"),
        (HEADS, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
        (HEADS, "encoder_attention_heads linear_num_value_heads mamba_n_heads mamba_num_heads"),
        (2, "num_key_value_heads num_experts_per_tok linear_num_key_heads index_n_heads eos_token_id mamba_expand"),
        (8, "head_dim linear_key_head_dim linear_value_head_dim qk_nope_head_dim v_head_dim index_topk index_head_dim"),
        (8, "hidden_size_per_layer_input mamba_d_state state_size ssm_state_size attention_window_size"),
        (4, "num_local_experts num_experts n_routed_experts qk_rope_head_dim rotary_dim"),
        (16, "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank kv_lora_rank"),
        (16, "mamba_d_head mamba_head_dim"),
        (5, "sliding_window"),
        (1, "bos_token_id n_group topk_group first_k_dense_replace mamba_n_groups n_shared_experts"),
        (0, "pad_token_id"),
        (0.3, "initializer_range init_std"),
        (True, "is_decoder"),
    )
    for name in names.split()
}
"""Values of config fields, by field name."""

LATENT: dict[str, Any] = {"head_dim": None, "num_key_value_heads": HEADS}  # MLA has qk_*_head_dim instead
HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * (LAYERS // 2)},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]], "window_size": 5, "num_layers": LAYERS},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    **{name: LATENT | {"layer_types": HYBRID} for name in ("kimi_linear", "bailing_hybrid")},
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "axk1", "axk2"), LATENT
    ),
    "minicpm3": LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * (LAYERS // 2), "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "sarvam_mla": LATENT | {"head_dim": 4},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3, "loop_num_passes": 3,
    },
    "youtu": LATENT,
    "cohere_compass_text": {
        "layer_types": MIXED,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]} for kind in set(MIXED)
        },
    },
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": MIXED, "activation_sparsity_pattern": [0.0] * LAYERS},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2), "num_dense_layers": 1},
    "longcat_flash": LATENT | {"head_dim": 4, "num_layers": 2, "zero_expert_num": 2, "moe_topk": 2},
    "nemotron_h": {"hybrid_override_pattern": "M*-*", "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 1},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"] * (LAYERS // 2), "hc_lowrank": 8,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "xlm": {"emb_dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_key_value_heads": HEADS, "mamba_dt_rank": 4,
        "use_mamba_kernels": False, "tie_word_embeddings": False, "layers_block_type": ["mamba", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""Values of config fields that only some architectures need, by model type; None leaves a field at its default."""


def small_config(config_class: Any) -> Any:
    """Return the config of a small model, also of its parts (such as text and images).

    Fields whose values the architecture rejects are left at their defaults.
    """
    known = set(inspect.signature(config_class.__init__).parameters) | set(config_class.__dataclass_fields__)
    renamed = set(config_class.attribute_map)
    fields = {name: value for name, value in SMALL.items() if name in known - renamed}
    fields |= SPECIAL.get(config_class.model_type, {})
    for name in config_class.sub_configs:
        if (part := getattr(config_class(), name, None)) is not None:
            fields[name] = small_config(type(part))
    fields = {name: value for name, value in fields.items() if value is not None}
    while True:
        try:
            return config_class(**fields)
        except Exception as error:
            refused = [name for name in fields if f"`{name}`" in str(error) or f"'{name}'" in str(error)]
            if not refused:
                raise
            del fields[refused[0]]


def small_model(model_type: str) -> Any:
    """Build a small random model with eager attention, in evaluation mode and float32.

    Raises:
        ValueError: if it has more than 20 million parameters.
    """
    config = small_config(CONFIG_MAPPING[model_type])
    with torch.device("meta"):
        size = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(NO_SINK)
    return model


def importance_by_matrices(model: Any, tokens_NT: torch.Tensor) -> torch.Tensor:
    """Return the importance (L, H, T) from the attention matrices (N, H, T, T or more) that the model returns.

    Raises:
        ValueError: if the model returns no such matrices.
    """
    with torch.no_grad():
        matrices = model(tokens_NT, output_attentions=True, use_cache=False).attentions or ()
    square = [one.float() for one in matrices if one is not None and one.ndim == 4]
    if not square or any(one.shape[-2] != LENGTH or one.shape[-1] < LENGTH for one in square):
        raise ValueError("the model returns no attention matrices")
    queries_T = torch.arange(LENGTH, 0, -1)
    return torch.stack([(one[..., -LENGTH:].sum(2) / queries_T).mean(0) for one in square])


def outcome(model_type: str) -> dict[str, Any]:
    """Return `outcome` (see the module docstring) for a model type, with `largest_difference` or the reason `why`."""
    tokens_NT = torch.randint(3, 64, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(1))
    try:
        model = small_model(model_type)
        with torch.no_grad():
            model(tokens_NT)
    except Exception as error:
        return {"outcome": "not compared", "why": f"no small model: {_line(error)}"}
    try:
        ours_LHT = torch.from_numpy(sinklab.measure(model, tokens_NT).importance)
    except SinklabError as error:
        return {"outcome": "refused", "why": _line(error)}
    except Exception as error:
        return {"outcome": "fails", "why": f"{type(error).__name__}: {_line(error)}"}
    try:
        theirs_LHT = importance_by_matrices(model, tokens_NT)
    except Exception as error:
        return {"outcome": "not compared", "why": _line(error)}
    if theirs_LHT.shape != ours_LHT.shape:
        return {"outcome": "not compared", "why": f"{len(theirs_LHT)} matrices for {len(ours_LHT)} layers"}
    difference = float((ours_LHT - theirs_LHT).abs().max())
    return {"outcome": "agrees" if difference <= CLOSE else "differs", "largest_difference": difference}


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="default: every causal architecture")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/architectures.json")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    hf.logging.set_verbosity_error()
    found = {}
    for model_type in given.model_types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        found[model_type] = outcome(model_type)
        print(model_type, *found[model_type].values(), flush=True)
    counts = Counter(one["outcome"] for one in found.values())
    print(", ".join(f"{count} {name}" for name, count in counts.most_common()))
    if given.save:
        document = {"environment": environment(), "transformers": hf.__version__, "counts": counts, "models": found}
        write_json(RESULTS / "architectures.json", document)


if __name__ == "__main__":
    main()
