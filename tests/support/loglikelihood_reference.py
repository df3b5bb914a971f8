"""Log-likelihoods of continuations written from the definition: transformers and torch alone, one text at a time.

log p(continuation | context) = sum over its tokens of log softmax(logits before the token)[token]
"""

from pathlib import Path
from typing import Any

import torch
import transformers as hf


def reference_model(folder: Path, gguf: str | None = None, rebuilt: bool = False) -> tuple[Any, Any]:
    """Model as transformers loads it, in float32, and the tokenizer of tokenizer.json, or that of the GGUF file.

    `AutoTokenizer` rebuilds some tokenizers from their vocabulary, and drops characters that the file makes `<unk>`;
    with `rebuilt` its tokenizer is returned.
    """
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    if gguf is None and not rebuilt:
        return model.eval(), hf.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return model.eval(), hf.AutoTokenizer.from_pretrained(folder, **options)


@torch.no_grad()
def log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """Log-likelihood of the tokens after those shared with the context alone, and True if each is the most likely."""
    whole, alone = tokenizer(f"{context}{continuation}")["input_ids"], tokenizer(context)["input_ids"]
    before = 0
    while before < len(alone) and alone[before] == whole[before]:
        before += 1
    logits = model(torch.tensor([whole])).logits[0].double()
    total, greedy = 0.0, True
    for place in range(before, len(whole)):
        log_p = torch.log_softmax(logits[place - 1], -1)
        total += float(log_p[whole[place]])
        greedy &= int(log_p.argmax()) == whole[place]
    return total, greedy


def hellaswag_answers(model: Any, tokenizer: Any, item: dict[str, Any]) -> list[tuple[float, bool]]:
    """Log-likelihood of each ending of an item, preceded by a space."""
    return [log_likelihood(model, tokenizer, item["query"], f" {ending}") for ending in item["endings"]]
