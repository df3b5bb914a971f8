"""sinklab: a laboratory for attention sinks in language models.

    import sinklab
    result = sinklab.measure(model, tokens)          # a Measurement: sinks, norms, loss
    with sinklab.probe(model) as watch:              # in your own loop, or during generate
        model.generate(...)
    watch.layers[0].importance_BHT                   # alpha of every head and position

    sinklab.Measurement.load("runs/m")               # one that `sinklab measure --out runs/m` has kept
    Trainer(.., callbacks=[sinklab.SinkCallback(tokens)])     # the sink at every evaluation of transformers or trl

    sinklab.register()                               # AutoModelForCausalLM then knows what `sinklab export` wrote

Importing it brings in nothing heavy; the first use of a name does. help(sinklab.measure) describes its arguments.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sinklab import display

if TYPE_CHECKING:
    from sinklab.measuring.api import measure
    from sinklab.measuring.huggingface.callback import SinkCallback
    from sinklab.measuring.huggingface.probe import probe
    from sinklab.measuring.measurement import Measurement

__version__ = "0.1.0"
__all__ = ["Measurement", "SinkCallback", "measure", "probe", "register"]


_MODULES = {
    "measure": "sinklab.measuring.api",
    "probe": "sinklab.measuring.huggingface.probe",
    "SinkCallback": "sinklab.measuring.huggingface.callback",
    "Measurement": "sinklab.measuring.measurement",
}


def register() -> None:
    """Register the models that `sinklab export` writes with AutoConfig and AutoModelForCausalLM of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from sinklab.model.huggingface import MODEL_TYPE, SinklabConfig, SinklabForCausalLM

    AutoConfig.register(MODEL_TYPE, SinklabConfig, exist_ok=True)
    AutoModelForCausalLM.register(SinklabConfig, SinklabForCausalLM, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sinklab' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


display.chart = lambda measurement, what: import_module("sinklab.report.measurement_figures").chart(measurement, what)
display.html = lambda measurement: import_module("sinklab.report.result_tables").html(measurement)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
