"""`sinklab.assess`: assess a model in memory, or one by its name, on token ids or on a text."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from sinklab.assessing.assess_model import Assessment
from sinklab.assessing.assess_model import assess as assess_opened
from sinklab.assessing.parts.caches import PromptCache
from sinklab.assessing.settings import TOLERANCE, AssessOptions
from sinklab.data.textfiles import given_text
from sinklab.errors import InputError, named_arguments
from sinklab.measuring.inputs import batch_tokens, token_matrix
from sinklab.models.adapter import LanguageModel, unwrapped
from sinklab.models.huggingface.loading import AS_IT_IS, Loading
from sinklab.opening import model_in_memory, open_model


@named_arguments("text", "tokenizer", "tolerance", *AssessOptions.model_fields)
def assess(
    model: "LanguageModel | str | Path",
    tokens: Tensor | np.ndarray | Sequence[Sequence[int]] | Mapping[str, Any] | Iterable[Any] | None = None,
    *,
    text: str | Path | Sequence[Any] | None = None,
    tokenizer: Any = None,
    parts: Sequence[str] = (),
    press: Any = None,
    out: str | Path | None = None,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> Assessment:
    """Assess what a model loses without its sink, and what the sink costs; return an `Assessment`.

        done = sinklab.assess(model, text=["A document .."], parts=["streaming", "kv_formats"], quick=True)
        print(done)
        done.numbers()["streaming_added"]

    Args:
        model: a Hugging Face causal language model, or the name of a model: a run directory, a model directory, a .gguf
            file, or a name on the Hugging Face hub.
        tokens: token ids (sequences, length) or batches of them without padding, as in `sinklab.measure`; default: a
            text.
        text: a list of documents, a text file, a folder of them, or a source such as "stdlib"; default: the validation
            text of a run, or the text that comes with sinklab.
        tokenizer: tokenizer for a text, or its path or hub name; default: that with which the model was saved.
        parts: names of the parts (docs/assess.md); default: those that are not slow.
        press: a press of kvpress, or a mapping from name to press, for the part `prompt_cache`: the loss with each of
            them in place of the built-in policies, and with the first keys kept and dropped. Only Hugging Face models.
        out: directory of assessment.json; a repeated call resumes it.
        tolerance: loss in nats per token that a setting may add, for the verdicts.
        options: further options of `sinklab assess`, by the names of `AssessOptions`: quick, sequences, length,
            stream_length, caches, kept, budgets, sink_tokens, ...

    Raises:
        InputError: if an argument is invalid, there is too little text, or a part of `parts` does not apply to the
            model.
        SinklabError: if the model cannot be loaded, or a loss is not finite.
    """
    if tokens is not None and text is not None:
        raise InputError("pass `tokens` or `text`, not both")
    with given_text(text) as path:
        source: Path | Tensor | None = path
        if tokens is not None:
            tokens, mask_NT = batch_tokens(tokens)
            if mask_NT is not None and not mask_NT.all():
                raise InputError("`tokens` have padding, which is not supported: pass sequences of one length")
            source = token_matrix(tokens).cpu()
            N, T = source.shape
            options = {"length": T, "stream_length": T, "sequences": N, **options}
        if isinstance(model, str | Path):
            loading = AS_IT_IS if tokenizer is None else Loading(tokenizer=tokenizer)
            opened = open_model(str(model), loading, length=options.get("length") or 0, for_text=tokens is None)
        else:
            opened = model_in_memory(unwrapped(model), tokenizer, for_text=tokens is None)
        presses = {} if press is None else press if isinstance(press, Mapping) else {type(press).__name__: press}
        if presses and parts and PromptCache.name not in parts:
            raise InputError(f"`press` belongs to the part `{PromptCache.name}`: add it to `parts`")
        settings = AssessOptions(parts=tuple(parts), **options)
        saved = None if out is None else Path(out)
        return assess_opened(opened, source, settings, presses=presses, out=saved, tolerance=tolerance)
