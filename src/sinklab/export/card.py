"""The model card, README.md: what the model is, what was measured of it, how it loads, and the recipe."""

from collections.abc import Sequence

import sinklab
from sinklab.export.forms import CODE, Form
from sinklab.train.directory.history import Evaluation
from sinklab.train.recipe import Recipe

HEAD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
  - sinklab
  - attention-sink
---
"""


def model_card(recipe: Recipe, step: int, history: Sequence[Evaluation], form: Form) -> str:
    """README.md of an exported run.

    Args:
        step: at which it was exported.
        history: its evaluations, of which the last one up to the step is shown.
    """
    parts = [
        f"{HEAD}\n# {recipe.name}",
        f"A small LLaMA-style language model, step {step:,} of {recipe.train.steps:,} of a training run of sinklab "
        f"{sinklab.__version__}, a laboratory for attention sinks in language models.",
        _numbers(recipe, [row for row in history if row.step <= step]),
        _loading(form),
        *_warnings(recipe),
        f"## Recipe\n\n```yaml\n{recipe.to_yaml()}```\n",
    ]
    return "\n\n".join(part for part in parts if part)


def _numbers(recipe: Recipe, history: list[Evaluation]) -> str:
    """A table of the last evaluation."""
    if not history:
        return ""
    last, metric = history[-1], recipe.metric
    rows = {
        "validation loss, nats per token": (last.valid_loss, ".4f"),
        f"Sink_1, percent of heads (eps {metric.eps:g}, {metric.sequences} sequences of {metric.length} tokens)": (
            next(iter(last.sink_rate), None),
            ".2f",
        ),
        "on the bias, percent of heads": (last.sink_rate_bias, ".2f"),
        "norm of the first hidden state over the others', largest block": (last.largest_norm_ratio, ".2f"),
        "tokens trained on": (last.tokens, ",.0f"),
    }
    lines = [f"| {name} | {value:{form}} |" for name, (value, form) in rows.items() if value is not None]
    return f"## At step {last.step:,}\n\n| | |\n|---|---|\n" + "\n".join(lines)


def _loading(form: Form) -> str:
    first = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    last = "\ntokenizer = AutoTokenizer.from_pretrained(DIR)"
    if form.is_foreign:
        return _python(f"{first}\n\nmodel = AutoModelForCausalLM.from_pretrained(DIR){last}", form)
    return _python(
        f"{first}\nimport sinklab\n\n"
        f"sinklab.register()  # or, without sinklab, trust_remote_code=True: {CODE}.py is then run\n"
        f"model = AutoModelForCausalLM.from_pretrained(DIR){last}",
        form,
    )


def _python(code: str, form: Form) -> str:
    own = "" if form.is_foreign else f" `{CODE}.py` is sinklab's own code in one file; it needs torch and pydantic."
    return f"## Loading\n\nThe architecture is `{form.architecture}`.{own}\n\n```python\n{code}\n```"


def _warnings(recipe: Recipe) -> list[str]:
    """What of the training data a tokenizer cannot write."""
    data = recipe.data
    written = [name for name in ("fixed_token", "random_tokens") if getattr(data, name) is not None]
    if not written:
        return []
    return [
        f"The sequences that it was trained on were changed (`data.{'`, `data.'.join(written)}`), which the tokenizer "
        "does not do: numbers measured on plain text differ from those of the run."
    ]
