"""PEFT adapters (such as LoRA): which adapters belong to a model, and their application to its modules.

A directory is an adapter if it has an adapter_config.json. Without weights of a model in it, the base model is the one
that the config names. Adapters are applied by transformers and peft without merging, so that weights are not rounded
again.
"""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.errors import InputError, cause
from sinklab.extras import require_extra
from sinklab.files import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "adapter_config.json"
OWN = "default"  # name that transformers gives to an adapter in the directory of its base model


def base_and_adapters(name: str, adapters: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the base model, and the adapters to apply to it in order.

    Args:
        name: name of a model, or directory of an adapter.
        adapters: directories or hub names of further adapters.

    Raises:
        InputError: if peft is not installed, or the config of an adapter cannot be read or names no base model.
    """
    own = [name] if (Path(name) / CONFIG).is_file() else []
    for adapter in adapters:
        if Path(adapter).exists() and not (Path(adapter) / CONFIG).is_file():
            raise InputError(f"--adapter {adapter} has no {CONFIG}: pass the directory of a PEFT adapter")
    if own or adapters:
        require_extra("adapters", ("peft", "accelerate"), f"the adapter {[*own, *adapters][0]}")
    if not own or (Path(name) / "config.json").is_file():
        return name, [*own, *adapters]
    try:
        base = parse_json((Path(name) / CONFIG).read_text("utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{Path(name) / CONFIG} cannot be read: {cause(error)}") from error
    if not base:
        raise InputError(
            f"{name} is an adapter whose {CONFIG} names no base model: pass the base model, and --adapter {name}"
        )
    return str(base), [*own, *adapters]


def apply_adapters(model: "PreTrainedModel", base: str, adapters: Sequence[str]) -> list[str]:
    """Apply adapters to a model, all of them active at the same time; return a note on each.

    An adapter in the directory `base` itself has been applied by transformers when the weights were loaded.

    Raises:
        InputError: if an adapter cannot be loaded, or does not fit the model.
    """
    if not adapters:
        return []
    names = [OWN if one == base else f"adapter_{number}" for number, one in enumerate(adapters)]
    for name, adapter in zip(names, adapters, strict=True):
        if name != OWN:
            try:
                model.load_adapter(adapter, adapter_name=name)
            except Exception as error:  # peft raises various exceptions
                raise InputError(f"the adapter {adapter} could not be applied to {base}: {cause(error)}") from error
    if len(names) > 1:
        layer_class: Any = import_module("peft.tuners.tuners_utils").BaseTunerLayer
        modules: Any = model.modules()
        for module in modules:  # as transformers' set_adapter, which refuses versions of peft that load fine
            if isinstance(module, layer_class):
                module.set_adapter(names)
    return [_note(model, name, adapter) for name, adapter in zip(names, adapters, strict=True)]


def _note(model: "PreTrainedModel", name: str, adapter: str) -> str:
    config: Any = model.peft_config[name]
    kind = str(getattr(config.peft_type, "value", config.peft_type)).lower()
    targets = getattr(config, "target_modules", None) or ()
    on = targets if isinstance(targets, str) else ", ".join(sorted(targets))
    rank = f", rank {config.r}" if getattr(config, "r", None) else ""
    return f"the adapter {adapter} is applied ({kind}{rank}{f', on {on}' if on else ''})"
