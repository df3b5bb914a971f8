"""Names that transformers' Auto classes look up: `import sinklab` has these called once transformers is imported."""


def register_config() -> None:
    """Have AutoConfig know config.json files of exported runs."""
    from transformers.models.auto.configuration_auto import AutoConfig

    from sinklab.model.huggingface.configuration import MODEL_TYPE, SinklabConfig

    AutoConfig.register(MODEL_TYPE, SinklabConfig, exist_ok=True)


def register_model() -> None:
    """Have AutoModelForCausalLM know exported runs."""
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    from sinklab.model.huggingface.configuration import SinklabConfig
    from sinklab.model.huggingface.modeling import SinklabForCausalLM

    AutoModelForCausalLM.register(SinklabConfig, SinklabForCausalLM, exist_ok=True)
