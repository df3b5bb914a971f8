"""sinklab: attention sinks in language models.

    import sinklab
    result = sinklab.measure("org/model")            # a Measurement: sinks, norms, loss; print(result) sums it up
    result = sinklab.measure(model, tokens)          # of a model in memory, on token ids or on text=[..]
    sinklab.assess(model, text=[..], parts=["streaming"])    # what it loses without the sink
    with sinklab.probe(model) as watch:              # record the forward passes of a Hugging Face model
        model.generate(...)
    watch.layers[0].importance_BHT                   # alpha of the first attention layer, (batch, head, position)
    monitor = sinklab.monitor(model, every=100)      # the sink in the steps of a training loop
    with sinklab.watch_attention(module) as watch:   # the same for any PyTorch module
        module(tokens)

    sinklab.Measurement.load("runs/m")               # the result of `sinklab measure --out runs/m`
    Trainer(.., callbacks=[sinklab.SinkCallback(tokens)])     # measure at every evaluation, with transformers or trl

    sinklab.register()                               # AutoModelForCausalLM then loads all `sinklab export` directories

Each of these names is imported on first use. help(sinklab.measure) describes the arguments of `measure`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.assessing.api import assess
    from sinklab.measuring.measurement import Measurement
    from sinklab.measuring.monitor import monitor
    from sinklab.measuring.probe import probe, record_attention, watch_attention
    from sinklab.survey.api import SinkCallback, measure

__version__ = "0.3.0"
__all__ = [
    "Measurement",
    "SinkCallback",
    "assess",
    "measure",
    "monitor",
    "probe",
    "record_attention",
    "register",
    "watch_attention",
]


_MODULES = {
    "assess": "sinklab.assessing.api",
    "measure": "sinklab.survey.api",
    "monitor": "sinklab.measuring.monitor",
    "probe": "sinklab.measuring.probe",
    "SinkCallback": "sinklab.survey.api",
    "Measurement": "sinklab.measuring.measurement",
    "watch_attention": "sinklab.measuring.probe",
    "record_attention": "sinklab.measuring.probe",
}


def register() -> None:
    """Register sinklab's architecture, SinklabForCausalLM, with transformers' AutoConfig and AutoModelForCausalLM.

    `sinklab export` uses it for models that no architecture of transformers can represent.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from sinklab.model.huggingface import MODEL_TYPE, SinklabConfig, SinklabForCausalLM

    AutoConfig.register(MODEL_TYPE, SinklabConfig, exist_ok=True)
    AutoModelForCausalLM.register(SinklabConfig, SinklabForCausalLM, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'sinklab' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def draw_chart(measurement: "Measurement", what: str) -> Any:
    """Draw a chart of a measurement, for `Measurement.plot`; `sinklab.measuring` does not import `sinklab.report`."""
    return import_module("sinklab.report.measurement_figures").chart(measurement, what)


def render_html(measurement: "Measurement") -> str:
    """Return the HTML view of a measurement in notebooks."""
    return import_module("sinklab.report.html").html(measurement)


def render_text(result: Any) -> str:
    """Return the text of `print(result)` of a measurement or assessment, as the command prints it."""
    return import_module("sinklab.commands.results").result_text(result)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
