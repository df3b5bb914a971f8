"""Names of the dtypes of a model's weights."""

from sinklab.errors import InputError

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
ALIASES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp64": "float64",
    "double": "float64",
}


def dtype_name(given: str) -> str:
    """Return one of `DTYPES` for a name as people write it: `fp16`, `torch.float16` and `half` are float16.

    Raises:
        InputError: if the name is unknown.
    """
    bare = given.lower().removeprefix("torch.")
    name = ALIASES.get(bare, bare)
    if name not in DTYPES:
        raise InputError(f"--dtype {given} is unknown; use one of {', '.join(DTYPES)}")
    return name
