"""Inputs of the recorded commands: texts, conversations, experiments, and small random models of many families."""

import os
from pathlib import Path
from typing import Any

import torch

DATA = Path(os.environ.get("SINKLAB_DATA", Path(__file__).parents[3] / "shared" / "data"))
RESULTS = Path(__file__).resolve().parents[2] / "results"
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # sharp attention, so that the importance of some positions exceeds eps
}
GROUPED: dict[str, Any] = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", GPT2),
    "llama": ("LlamaConfig", GROUPED),
    "gpt_neox": ("GPTNeoXConfig", SMALL),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", GROUPED),
    "granite": ("GraniteConfig", SMALL | {"num_key_value_heads": 2, "attention_multiplier": 0.3}),
    "gemma2": (
        "Gemma2Config",
        GROUPED | {"sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss": ("GptOssConfig", GROUPED | {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 5}),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "init_std": 0.3,
        },
    ),
    "falcon": ("FalconConfig", {key: SMALL[key] for key in SMALL if key != "intermediate_size"}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}),
    "mpt": ("MptConfig", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, "initializer_range": 0.3}),
    "gptj": ("GPTJConfig", GPT2 | {"rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 5,
            "initializer_range": 0.3,
        },
    ),
    "jamba": (
        "JambaConfig",
        SMALL
        | {
            "num_key_value_heads": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_d_conv": 2,
            "mamba_dt_rank": 4,
        },
    ),
}

EXPERIMENT_BASE = """
name: small
model: {layers: 2, width: 32, heads: 4, ffn_width: 48, context: 32}
train: {steps: 8, batch_size: 4, eval_every: 2, eval_sequences: 8, save_every: 4, precision: fp32}
metric: {sequences: 8, length: 32, eps: 0.1}
data: {source: text/all.jsonl, tokenizer: "train:300", bos: true}
"""
CLAIMS = """
claims:
  - {id: less_sink, text: "less sink", check: {is: less, value: sink_1, cell: sigmoid, than: softmax, by: 5}}
  - {id: learns, text: "it learns", check: {is: within, cell: softmax, value: valid_loss, at_most: 5.6}}
  - {id: alike, text: "same loss", check: {is: equal, cell: sigmoid, to: softmax, value: valid_loss, margin: 0.1}}
  - {id: none, text: "no sink", check: {is: absent, cell: sigmoid}}
  - {id: trains, text: "it trains", check: {is: trains, cell: softmax}}
  - {id: both, text: "both", check: {is: all, of: [{is: trains, cell: sigmoid}, {is: absent, cell: sigmoid}]}}
"""
TWO_SEEDS = (
    """
id: two_seeds
title: "Two cells"
question: "Which of them has a sink?"
base: base.yaml
cells: {softmax: {}, sigmoid: sigmoid}
columns: [sink_1, valid_loss, norm_ratio, streaming_added, int8_added]
assess: [streaming, quantisation]
seeds: 2
"""
    + CLAIMS
)
FIVE_SEEDS = (
    TWO_SEEDS.replace("two_seeds", "five_seeds")
    .replace("seeds: 2", "seeds: 5")
    .replace("assess: [streaming, quantisation]\n", "")
    .replace(", streaming_added, int8_added", "")
)
GRID = """
id: grid
title: "Two cells at two decays"
question: "Which of them has a sink?"
base: base.yaml
cells: {softmax: {}, sigmoid: sigmoid}
changes: {decay: {decay_0.1: {}, decay_0.5: {optim: {weight_decay: 0.5}}}}
columns: [sink_1, valid_loss]
seeds: 1
claims:
  - {id: bounded, text: "bounded", check: {is: within, cell: softmax+decay_0.5, value: valid_loss, at_most: 5.8}}
"""
TUNED = """
id: tuned
title: "Tuned on conversations"
question: "Does tuning change the sink?"
base: base.yaml
cells: {softmax: {model: {context: 128}}}
tune: {lr: 0.001, steps: 4, batch_size: 2, held_out: 4, eval_every: 2, save_every: 2, sequences: 4, sink_length: 16}
columns: [sft_loss_fall, sft_largest_grad_norm, sft_sink_change]
seeds: 1
claims:
  - {id: learns, text: "it learns", check: {is: within, cell: softmax, value: sft_loss_fall, at_least: 0.0}}
"""
MEASURED = """
id: ways
title: "Ways to measure"
question: "Which of them changes the sink?"
cells:
  natural: {inputs: natural, sequences: 12, length: 24, eps: 0.1, details: true}
  short: {inputs: natural, sequences: 12, length: 12, eps: 0.1}
  random: {inputs: random, sequences: 12, length: 24, eps: 0.1}
  repeated: {inputs: repeat, sequences: 12, length: 24, eps: 0.1}
columns: [sink_1, norm_ratio, importance_first, cosine_gap, norm_product_ratio, kurtosis]
claims:
  - {id: more, text: "more", check: {is: greater, cell: natural, than: random, value: sink_1}}
  - {id: bounded, text: "bounded", check: {is: within, cell: natural, value: importance_first, at_least: 1.0}}
  - {id: equal, text: "equal", check: {is: equal, cell: short, to: natural, value: sink_1, margin: 10.0}}
"""


def write_texts() -> None:
    """Write texts, conversations and experiments to the folders text/ and experiments/ in the working directory."""
    Path("text/domains").mkdir(parents=True)
    every = []
    for name in ("wikitext_2", "github_code", "shakespeare"):
        lines = (DATA / "domains" / f"{name}.jsonl").read_text("utf-8").splitlines()
        Path(f"text/domains/{name}.jsonl").write_text("\n".join(lines[:40]) + "\n", "utf-8")
        every += lines
    few = [line for place, line in enumerate(every) if place % 10 == 0]
    Path("text/all.jsonl").write_text("\n".join(few) + "\n", "utf-8")
    Path("text/more.jsonl").write_text("\n".join(every) + "\n", "utf-8")
    chats = (DATA / "chat" / "messages.jsonl").read_text("utf-8").splitlines()[:20]
    Path("text/chat.jsonl").write_text("\n".join(chats) + "\n", "utf-8")
    for file in Path("text").rglob("*.jsonl"):
        os.utime(file, (0, 0))  # the cache identifies a text by size and modification time
    Path("experiments").mkdir()
    for name, text in {
        "base": EXPERIMENT_BASE,
        "two_seeds": TWO_SEEDS,
        "five_seeds": FIVE_SEEDS,
        "grid": GRID,
        "tuned": TUNED,
        "ways": MEASURED,
    }.items():
        Path(f"experiments/{name}.yaml").write_text(text, "utf-8")


def write_model(name: str) -> None:
    """Write a random model of the family `name`, with a tokenizer trained on text/all.jsonl, to models/NAME."""
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    words = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(Path("text/all.jsonl").read_text("utf-8").splitlines(), words)
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    kind, values = FAMILIES[name]
    config = getattr(hf, kind)(**values, vocab_size=len(tokenizer), bos_token_id=1, eos_token_id=2, pad_token_id=0)
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(f"models/{name}")
    tokenizer.save_pretrained(f"models/{name}")
