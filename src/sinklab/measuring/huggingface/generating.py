"""`model.generate` under a probe: which ways of generating read each sequence once, and where sequences end."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from sinklab.errors import SinklabError
from sinklab.measuring.huggingface.recorder import Recorder
from sinklab.measuring.huggingface.totals import READ_AFTERWARDS

ONCE = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Read every token of what they return once, but the last, and no other."""


@contextmanager
def generating(model: PreTrainedModel, watch: Recorder) -> Iterator[None]:
    """Have `model.generate` refuse what the records could not follow, and say what ends a sequence.

    Beam search orders sequences anew after the last pass as well, which no later pass shows.
    """
    generate: Any = getattr(model, "generate", None)
    before = vars(model).get("generate")
    if generate is None:
        yield
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(generate).bind_partial(*args, **kwargs).arguments
        config = _config(model, given.get("generation_config"), given.get("kwargs", {}))
        mode = config.get_generation_mode(given.get("assistant_model"))
        if mode not in ONCE:
            raise SinklabError(
                f"{mode.value.replace('_', ' ')} reads tokens that it takes back, or exchanges sequences, and the "
                f"records of a probe would be of others than it returns. {READ_AFTERWARDS}"
            )
        with watch.generating(_ends(config)):
            return generate(*args, **kwargs)

    model.generate = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.generate
        if before is not None:
            model.generate = before


def _config(model: PreTrainedModel, given: GenerationConfig | None, named: dict[str, Any]) -> GenerationConfig:
    """What holds: what is given by name, else in a config, else in the model's."""
    config = GenerationConfig()
    for source in (vars(model.generation_config), {} if given is None else vars(given), named):
        for name, value in source.items():
            if value is not None and hasattr(config, name):
                setattr(config, name, value)  # not `update`, whose warnings `generate` gives as well
    return config


def _ends(config: GenerationConfig) -> tuple[int, ...]:
    ends = config.eos_token_id
    if isinstance(ends, Tensor):
        ends = ends.flatten().tolist()
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)
