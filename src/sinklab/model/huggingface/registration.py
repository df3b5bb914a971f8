"""Registration of exported runs with transformers' Auto classes."""


def register() -> None:
    """Have AutoConfig and AutoModelForCausalLM know the models that `sinklab export` writes; imports transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from sinklab.model.huggingface.configuration import MODEL_TYPE, SinklabConfig
    from sinklab.model.huggingface.modeling import SinklabForCausalLM

    AutoConfig.register(MODEL_TYPE, SinklabConfig, exist_ok=True)
    AutoModelForCausalLM.register(SinklabConfig, SinklabForCausalLM, exist_ok=True)
