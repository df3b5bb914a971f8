"""Random legal recipes over all combinations of docs/interventions.md, and a set that covers the required ones.

A draw that `build_recipe` refuses is repeated, so that only `build_recipe` decides which recipes are legal.
"""

import random
from collections.abc import Iterator
from typing import Any

from sinklab.errors import InputError
from sinklab.train.recipe import Recipe, build_recipe

Choice = dict[str, Any]
"""A kind and its values, as a recipe has them."""
Cell = dict[str, Any]
"""Values of one recipe: an `operation` and other choices with their values, a `mask`, a `backend`."""

VALUED_KEY = {"kind": "k", "value": {"direction": "first", "norm": 1.5}}
BIASES = [
    {"kind": "none"},
    {"kind": "sink_token"},
    {"kind": "sink_token", "count": 3},
    {"kind": "k"},
    VALUED_KEY,
    {"kind": "k", "value": {"direction": "uniform", "norm": 2.5}},
    {"kind": "k", "shared": True, "learnable_dims": 1},
    {"kind": "kv"},
    {"kind": "kv", "shared": True},
    {"kind": "kv", "learnable_dims": 1},
    {"kind": "v"},
    {"kind": "v", "shared": True},
    {"kind": "sink_logit"},
    {"kind": "sink_logit", "start": -0.7},
    {"kind": "k", "start": 0.4},
    {"kind": "kv", "start": 0.4},
    {"kind": "off_by_one"},
]
OPERATIONS = [
    {"kind": "softmax"},
    {"kind": "softmax", "alpha": 0.7, "p": 0.5},
    {"kind": "softmax", "p": 3.0},
    {"kind": "forgetting"},
    {"kind": "forgetting", "start": 1.5},
    *({"kind": "stick_breaking", "rest": rest} for rest in ("dropped", "own", "learned")),
    {"kind": "scalable_softmax"},
    {"kind": "scalable_softmax", "start": 0.4, "offset": 0.3},
    *({"kind": kind, "normalised": normalised} for kind in ("sigmoid", "elu1", "relu") for normalised in (False, True)),
    *({"kind": "sigmoid", "shift": shift, "normalised": False} for shift in ("context", "row", "learned")),
    {"kind": "sigmoid", "shift": "row", "normalised": True},
    *({"kind": kind, "normalised": True, "p": p} for kind, p in (("sigmoid", 2.0), ("elu1", 0.5), ("relu", 1.5))),
    {"kind": "clipped_softmax"},
    {"kind": "clipped_softmax", "zeta": 1.1, "gamma": -0.05},
    {"kind": "clipped_softmax", "zeta": 1.0, "gamma": 0.0},
    {"kind": "softpick"},
    {"kind": "softpick", "eps": 0.3},
    {"kind": "elastic_softmax", "start": -0.5},
    {"kind": "entmax15"},
    {"kind": "differential"},
    {"kind": "differential", "lambda_init": 0.4},
    {"kind": "differential_v2"},
    {"kind": "threshold_rectified"},
    {"kind": "threshold_rectified", "beta": 0.3, "power": 1.5},
    {"kind": "threshold_differential"},
    {"kind": "threshold_differential", "beta": 0.2, "power": 3.0, "start": 0.8},
]
KERNELS = [
    {"kind": kind, "normalised": normalised}
    for kind in ("elu_kernel", "identity", "mlp")
    for normalised in (False, True)
]
POSITIONS = [
    {"kind": "none"},
    {"kind": "absolute"},
    {"kind": "absolute", "theta": 50.0},
    {"kind": "learnable"},
    {"kind": "relative"},
    {"kind": "relative", "buckets": 6, "max_distance": 9},
    {"kind": "t5"},
    {"kind": "t5", "buckets": 7, "max_distance": 12},
    {"kind": "alibi"},
    {"kind": "rotary"},
    {"kind": "rotary", "theta": 100.0},
    {"kind": "rotary", "theta": 100.0, "share": 0.5},
    {"kind": "rotary", "share": 0.25},
]
ADDED = ("absolute", "learnable")
FULL = {"kind": "full"}
DELTA = {"kind": "gated_delta", "every": 2}
SPARSE_DELTA = {"kind": "gated_delta", "every": 3}
KIMI = {"kind": "kimi_delta", "every": 2}
GROUPED_KIMI = {**KIMI, "heads": 4, "key_heads": 2, "key_width": 5, "value_width": 3, "conv": 3}
GROUPED_DELTA = {**DELTA, "heads": 4, "key_heads": 2, "key_width": 5, "value_width": 3, "conv": 3}
LATENT = {"kind": "latent", "kv_rank": 5, "q_rank": 7, "nope_width": 3, "rope_width": 4, "value_width": 6}
RANGES = {
    "alpha": (0.1, 2.0), "p": (0.3, 4.0), "zeta": (1.0, 1.3), "gamma": (-0.2, 0.0), "start": (-1.0, 1.0),
    "offset": (-0.5, 1.5), "lambda_init": (0.1, 0.9), "theta": (2.0, 1e4),
    "beta": (0.05, 1.5), "power": (1.0, 3.0),
}  # fmt: skip
MASKS = ["causal", "window", "prefix", "document"]
VALUE_RESIDUALS = ["none", {"kind": "fixed", "first": 0.7, "own": -0.4}, "fixed", "learned"]


def random_recipe(seed: int, pattern: bool = False) -> Recipe:
    """The legal recipe of a seed; with `pattern`, some of its layers differ."""
    rng = random.Random(f"{'pattern' if pattern else 'recipe'} {seed}")
    while True:
        drawn = _drawn(rng, {})
        recipe = _tried(_with_pattern(rng, drawn) if pattern else drawn)
        if recipe is not None:
            return recipe


def covering_cells() -> dict[str, Cell]:
    """Required combinations of interventions, by name."""
    cells = [
        *({"operation": o, "position": {"kind": "rotary"}, "bias": b}
          for o in OPERATIONS + KERNELS for b in ({"kind": "none"}, {"kind": "k"}, VALUED_KEY, {"kind": "sink_token"})),
        *({"operation": o, "mask": "prefix", "bias": b} for o in KERNELS for b in BIASES),
        *({"operation": {"kind": k}, "bias": b} for k in ("differential", "differential_v2") for b in BIASES),
        *({"bias": {"kind": "sink_token"}, "position": p} for p in POSITIONS),
        *({"bias": {"kind": "sink_token"}, "mask": m} for m in MASKS),
        *({"bias": {"kind": "sink_token", "count": 3}, "position": p} for p in POSITIONS),
        *({"bias": {"kind": "sink_token", "count": 4}, "mask": m} for m in MASKS),
        *({"operation": {"kind": "softmax"}, "mask": "causal", "bias": {"kind": b}, "backend": "sdpa"}
          for b in ("none", "sink_token", "v")),
        *({"pattern": {"every": 2, "mask": {"kind": "causal"}}, "mask": "window", "bias": b} for b in BIASES),
        *({"pattern": {"every": 2, "bias": b}, "bias": {"kind": "none"}} for b in BIASES if b["kind"] != "sink_token"),
        *({"pattern": {"every": 2, "mask": m}, "mask": "causal"}
          for m in ({"kind": "window", "width": 3}, {"kind": "prefix", "length": 3}, {"kind": "document"})),
        *({"pattern": {"every": 2, "position": p}, "position": o}
          for p in POSITIONS for o in ({"kind": "none"}, {"kind": "rotary", "theta": 30.0})
          if p["kind"] not in ADDED),
        *({"pattern": {"every": 2, "first": 1, "mask": {"kind": "causal"}, "position": {"kind": "none"}}, "mixer": m}
          for m in ({"kind": "attention"}, DELTA, GROUPED_DELTA)),
        *({"projection": {"kind": "latent"}, "bias": b} for b in BIASES),
        *({"projection": {"kind": "latent"}, "operation": o} for o in OPERATIONS[:3] + KERNELS),
        *({"projection": LATENT, "position": p} for p in POSITIONS if "share" not in p),
        *({"mixer": DELTA, "bias": b} for b in BIASES),
        *({"mixer": m, "mask": mask}
          for m in (DELTA, GROUPED_DELTA, KIMI, GROUPED_KIMI) for mask in ("causal", "window", "prefix")),
        *({"mixer": GROUPED_DELTA, "projection": p} for p in (FULL, LATENT)),
        *({"mixer": m, "layers": n, "value_residual": v}
          for m, n in ((DELTA, 3), (GROUPED_DELTA, 3), (SPARSE_DELTA, 4)) for v in VALUE_RESIDUALS[1:]),
        *({"exclusive": True, "head_norm": True, "bias": b, "mask": m} for b in BIASES for m in ("alone", "document")),
        *({"exclusive": True, "head_norm": True, "operation": o, "bias": {"kind": "none"}, "mask": "alone"}
          for o in OPERATIONS + KERNELS),
    ]  # fmt: skip
    return {" ".join(_words(cell)): cell for cell in cells}


def cell_is_legal(cell: Cell) -> bool:
    """Return True if the bias has an effect: without a value it needs a row sum, a sink logit needs scores."""
    operation, bias = cell.get("operation", {"kind": "softmax"}), cell.get("bias", {"kind": "none"})
    logit = bias["kind"] in ("sink_logit", "off_by_one")
    without_value = logit or (bias["kind"] == "k" and "value" not in bias)
    if operation["kind"] == "stick_breaking":  # the rest is in the place of a key or a logit
        return bias["kind"] in ("none", "sink_token", "v")
    return not ((logit or "start" in bias) and operation in KERNELS) and not (
        without_value and not operation.get("normalised", not operation["kind"].startswith("threshold"))
    )


def covering_recipe(name: str) -> Recipe | None:
    """A legal recipe of the cell, the rest drawn; None where every draw is refused."""
    rng, cell = random.Random(f"cell {name}"), covering_cells()[name]
    tries = (_tried(_drawn(rng, cell)) for _ in range(60))
    return next((recipe for recipe in tries if recipe is not None), None)


def _words(cell: Cell) -> Iterator[str]:
    for key, value in cell.items():
        if not isinstance(value, dict):
            yield f"{key}={value}"
            continue
        if key == "pattern":
            yield key
        for name, inner in value.items():
            shown = "-".join(str(part) for part in inner.values()) if isinstance(inner, dict) else inner
            yield str(shown) if name == "kind" else f"{name}={shown}"


def _tried(values: dict[str, Any]) -> Recipe | None:
    try:
        return build_recipe(values)
    except InputError:
        return None


def _drawn(rng: random.Random, cell: Cell) -> dict[str, Any]:
    heads = rng.choice([1, 2, 2, 3, 4, 4, 5, 6, 12])
    context = rng.randint(12, 20)
    operation = cell.get("operation") or _varied(rng, rng.choice(OPERATIONS + KERNELS))
    mask = _mask(rng, cell.get("mask") or rng.choice(MASKS), context)
    head_norm = cell.get("head_norm", rng.choice([*[False] * 7, *[True] * 2, "per_head"]))
    drawn = {
        "seed": rng.randint(0, 999),
        "metric": {"length": context},
        "model": {
            "layers": cell.get("layers") or rng.choice([2, 2, 3]),
            "width": heads * rng.choice([w for w in (2, 4, 6, 8, 10, 12, 16, 24, 32) if 16 <= w * heads <= 32]),
            "heads": heads,
            "kv_heads": rng.choice([None, *(g for g in range(1, heads + 1) if heads % g == 0)]),
            "ffn_width": rng.randint(8, 32),
            "vocab_size": rng.randint(8, 24),
            "context": context,
            "position": cell.get("position") or _varied(rng, rng.choice(POSITIONS)),
            "norm": {
                "kind": rng.choice(["rmsnorm", "rmsnorm_single", "layernorm", "dynamic_tanh"]),
                "placement": rng.choice(["pre", "post", "sandwich"]),
                # A head norm cancels the scale of a head but for eps: a large eps keeps its gradient above rounding.
                "eps": 1e-2 if head_norm else rng.choice([1e-5, 1e-2]),
                "alpha": rng.uniform(0.2, 1.5),
                "qk_norm": rng.choice([False, False, False, True, "per_head"]),
                "head_norm": head_norm,
                "gate_rank": rng.choice([None, None, 1, 3]),
            },
            "embedding": rng.choice(["plain", "plain", "projected"]),
            "ffn": rng.choice(["relu", "gelu", "swish", "reglu", "geglu", "swiglu"]),
            "attention": {
                "operation": operation,
                "bias": cell.get("bias") or _varied(rng, rng.choice(BIASES)),
                "mask": mask,
                "softcap": rng.choice([None, None, rng.uniform(0.5, 4.0)]),
                "backend": cell.get("backend") or rng.choice(["auto", "auto", "chunked", "eager", "sdpa"]),
            },
            "gate": rng.choice(
                ["none", "none", "head", "element", "value", "v_scale", {"kind": "head", "channels": 3}]
            ),
            "head_outputs": rng.choice(["concat", "concat", "sum"]),
            "init": rng.choice(["declared", "torch"]),
            "exclusive": cell.get("exclusive", rng.random() < 0.3),
            "projection": cell.get("projection") or rng.choice([FULL, FULL, FULL, {"kind": "latent"}, LATENT]),
            "mixer": cell.get("mixer")
            or rng.choice([*[{"kind": "attention"}] * 4, DELTA, GROUPED_DELTA, SPARSE_DELTA, KIMI, GROUPED_KIMI]),
            "value_residual": cell.get("value_residual") or rng.choice(VALUE_RESIDUALS),
            "pattern": cell.get("pattern"),
        },
    }
    if "projection" in cell:  # a latent projection supports neither kv_heads nor qk_norm
        drawn["model"] |= {"kv_heads": None, "norm": drawn["model"]["norm"] | {"qk_norm": False}}
    return drawn


def _with_pattern(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    """The recipe with some layers that differ."""
    model = drawn["model"]
    given = {
        "mask": _mask(rng, rng.choice(MASKS), model["context"]),
        "bias": _varied(rng, rng.choice(BIASES)),
        "position": _varied(rng, rng.choice(POSITIONS)),
    }
    kept = rng.sample(sorted(given), rng.randint(1, 3))
    pattern = {"every": rng.choice([1, 2, 2, 3]), "first": rng.choice([None, None, 1, 2])}
    return drawn | {"model": model | {"pattern": pattern | {part: given[part] for part in kept}}}


def _mask(rng: random.Random, kind: str, context: int) -> dict[str, Any]:
    if kind == "alone":
        return {"kind": "window", "width": 1}
    if kind == "window":
        return {"kind": kind, "width": rng.choice([1, rng.randint(2, 8), context, context + 3])}
    if kind == "prefix":
        return {"kind": kind, "length": rng.choice([1, rng.randint(2, 8), context])}
    return {"kind": kind, "eos_id": rng.randint(0, 7)} if kind == "document" else {"kind": kind}


def _varied(rng: random.Random, choice: Choice) -> Choice:
    """The same kind with its numbers drawn again; 0 and 1 are kept, because they are neutral."""
    varied = {key: rng.uniform(*RANGES[key]) if key in RANGES and value not in (0.0, 1.0) else value
              for key, value in choice.items()}  # fmt: skip
    if "buckets" in choice:
        varied |= {"buckets": rng.randint(2, 12), "max_distance": rng.randint(2, 24)}
    if "learnable_dims" in choice:
        varied["learnable_dims"] = rng.randint(1, 8)
    if "value" in choice:
        varied["value"] = choice["value"] | {"norm": rng.choice([0.0, rng.uniform(0.1, 4.0)])}
    return varied
