"""sinklab: a laboratory for attention sinks in language models.

    import sinklab
    result = sinklab.measure(model, tokens)          # a Measurement: sinks, norms, loss
    with sinklab.probe(model) as watch:              # in your own loop, or during generate
        model.generate(...)
    watch.layers[0].importance_BHT                   # alpha of every head and position

    sinklab.Measurement.load("runs/m")               # one that `sinklab measure --out runs/m` has kept
    Trainer(.., callbacks=[sinklab.SinkCallback(tokens)])     # the sink at every evaluation of transformers or trl

Importing it brings in nothing heavy; the first use of a name does. help(sinklab.measure) says what it takes. From then
on AutoModelForCausalLM and AutoConfig of transformers know the models that `sinklab export` writes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sinklab import display
from sinklab.imports import once_imported

if TYPE_CHECKING:
    from sinklab.measuring.api import measure
    from sinklab.measuring.huggingface.callback import SinkCallback
    from sinklab.measuring.huggingface.probe import probe
    from sinklab.measuring.measurement import Measurement

__version__ = "0.1.0"
__all__ = ["Measurement", "SinkCallback", "measure", "probe"]


def __getattr__(name: str) -> Any:
    if name == "measure":
        return import_module("sinklab.measuring.api").measure
    if name == "probe":
        return import_module("sinklab.measuring.huggingface.probe").probe
    if name == "SinkCallback":
        return import_module("sinklab.measuring.huggingface.callback").SinkCallback
    if name == "Measurement":
        return import_module("sinklab.measuring.measurement").Measurement
    raise AttributeError(f"module 'sinklab' has no attribute {name!r}")


display.chart = lambda measurement, what: import_module("sinklab.report.notebook").chart(measurement, what)
display.html = lambda measurement: import_module("sinklab.report.notebook").html(measurement)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


once_imported(
    "transformers.models.auto.configuration_auto",
    lambda: import_module("sinklab.model.huggingface.registration").register_config(),
)
once_imported(
    "transformers.models.auto.modeling_auto",
    lambda: import_module("sinklab.model.huggingface.registration").register_model(),
)
