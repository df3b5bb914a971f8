"""Cases of the Python library that no command covers: padding, generation, gradients, dtypes, the callback.

Every case writes numbers and hashes to python/NAME.json in the working directory, and reads models/, export/, train/ or
recipes/.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

import sinklab
from benchmarks.same_numbers.inputs import FAMILIES

MOVED = {"load_run": ("sinklab.train.run", "sinklab.train.runs"), "load_recipe": ("sinklab.train.recipe",)}
"""Modules in which a function is searched, in this order, because older versions have it elsewhere."""
PROBED = ("llama", "gpt2", "mistral", "gemma2", "gpt_oss", "granite", "opt", "bloom", "mpt", "gptj", "gpt_neo", "jamba")
EXPORTED = ("softmax", "k_biases", "sink_logit", "registers", "stick_breaking", "differential", "window")
TOKENS = torch.randint(3, 290, (4, 14), generator=torch.Generator().manual_seed(5))
LONG = torch.ones_like(TOKENS)
LEFT, RIGHT = LONG.clone(), LONG.clone()
for _row, _padded in enumerate((0, 1, 4, 9)):
    LEFT[_row, :_padded] = 0
    RIGHT[_row, len(LONG[0]) - _padded :] = 0


def write(name: str) -> None:
    """Run a case and write its result to python/NAME.json."""
    Path("python").mkdir(exist_ok=True)
    Path(f"python/{name}.json").write_text(json.dumps(_plain(CASES[name]()), indent=1), "utf-8")


def _plain(value: Any) -> Any:
    """Convert a value to JSON; arrays become dtype, shape, a SHA-256 of their bytes, and their sum, for readability."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        kept, value = str(value.dtype), (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    elif isinstance(value, np.ndarray):
        kept = str(value.dtype)
    else:
        return value
    digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    return {"dtype": kept, "shape": list(value.shape), "sha256": digest, "sum": float(np.sum(value, dtype=np.float64))}


def _found(name: str) -> Any:
    for module in MOVED[name]:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {MOVED[name]}: add its module to MOVED")


def _model(place: str, dtype: torch.dtype | None = None) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
    return model if dtype is None else cast(Any, model).to(dtype)


def _places() -> Iterator[tuple[str, str]]:
    yield from ((name, f"models/{name}") for name in PROBED)
    yield from ((f"export_{name}", f"export/{name}") for name in EXPORTED)


def _measured(*args: Any, **kwargs: Any) -> Any:
    measured = sinklab.measure(*args, **kwargs).model_dump()
    return {key: one for key, one in measured.items() if key not in ("seconds", "versions", "memory")}


def _watched(watch: Any) -> list[Tensor]:
    return [layer.importance_BHT for layer in watch.layers]


def _each(case: Callable[[Any], Any], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return the result of a case for every model, by name; if it raises an error, the name of the error's type."""
    found: dict[str, Any] = {}
    for name, place in _places():
        torch.manual_seed(0)
        with _or_error(found, name):
            found[name] = case(_model(place, dtype))
    return found


@contextmanager
def _or_error(found: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found[name] = type(error).__name__


def padding() -> Any:
    """Measurement and probe with padding on the left and on the right."""

    @torch.no_grad()
    def case(model: Any) -> Any:
        found: dict[str, Any] = {}
        for side, mask in (("left", LEFT), ("right", RIGHT)):
            with _or_error(found, f"measured_{side}"):
                found[f"measured_{side}"] = _measured(model, TOKENS, attention_mask=mask, eps=0.1, details=True)
            with _or_error(found, f"probed_{side}"), sinklab.probe(model) as watch:
                model(TOKENS, attention_mask=mask)
                found[f"probed_{side}"] = _watched(watch)
        return found

    return _each(case)


def generation() -> Any:
    """Generation under a probe: greedy, sampled, with padded prompts, without KV cache, and with a static cache."""

    @torch.no_grad()
    def case(model: Any) -> Any:
        found: dict[str, Any] = {}
        how = {"max_new_tokens": 7, "min_new_tokens": 7, "pad_token_id": 0, "eos_token_id": 2}
        ways: dict[str, dict[str, Any]] = {
            "greedy": {"do_sample": False, "attention_mask": LEFT},
            "drawn": {"do_sample": True, "top_k": 0, "num_return_sequences": 2, "attention_mask": LONG},
            "no_cache": {"do_sample": False, "use_cache": False, "attention_mask": LONG},
            "static": {"do_sample": False, "cache_implementation": "static", "attention_mask": LONG},
        }
        for way, options in ways.items():
            torch.manual_seed(1)
            with _or_error(found, way), sinklab.probe(model) as watch:
                text = model.generate(TOKENS, **how, **options)
                found[way] = [text, *_watched(watch)]
        return found

    return _each(case)


def gradients() -> Any:
    """Backward pass under a probe: loss, gradients and importance."""

    def case(model: Any) -> Any:
        model.train()
        with sinklab.probe(model) as watch:
            loss = model(TOKENS, labels=TOKENS).loss
            loss.backward()
            watched = _watched(watch)
        return {"loss": loss, "watched": watched, "grad": {n: p.grad for n, p in model.named_parameters()}}

    return _each(case)


def nested() -> Any:
    """Probe inside a probe, measurements with ablations and a perturbation inside a probe, and a probe with lengths."""

    @torch.no_grad()
    def case(model: Any) -> Any:
        found: dict[str, Any] = {}
        with _or_error(found, "probes"), sinklab.probe(model) as outer:
            model(TOKENS)
            with sinklab.probe(model) as inner:
                model(TOKENS[:2])
            found["probes"] = [_watched(outer), _watched(inner)]
        with _or_error(found, "measured"), sinklab.probe(model) as outer:
            found["measured"] = _measured(model, TOKENS, eps=0.1)
            found["around_measured"] = _watched(outer)
        for ablation in ("mask_first:1", "zero_massive"):
            with _or_error(found, ablation), sinklab.probe(model) as outer:
                found[ablation] = _measured(model, TOKENS, eps=0.1, ablate=[ablation], perturb=3)
                found[f"around_{ablation}"] = _watched(outer)
        with _or_error(found, "lengths"):
            found["lengths"] = _measured(model, TOKENS, lengths=[5, 9])
        return found

    return _each(case)


def dtypes() -> Any:
    """Measurement and probe in bfloat16 and float64."""
    found = {}
    for dtype in (torch.bfloat16, torch.float64):

        @torch.no_grad()
        def case(model: Any) -> Any:
            with sinklab.probe(model) as watch:
                logits = model(TOKENS).logits
            way = {"eps": 0.1, "details": True, "maps": [(1, 2)]}
            return {"logits": logits, "probed": _watched(watch), "measured": _measured(model, TOKENS, **way)}

        found[str(dtype)] = _each(case, dtype)
    return found


def own() -> Any:
    """Measurements of sinklab transformers loaded from runs: ablations, lengths, details, dtypes."""
    load_run, found = _found("load_run"), {}
    for run in sorted(Path("train").iterdir()):
        model = load_run(run).model
        found[run.name] = one = {}
        ways: dict[str, dict[str, Any]] = {
            "plain": {"lengths": [5, 9], "details": True, "maps": [(1, 2), (2, 1)]},
            "ablated": {"ablate": ["mask_first:1", "mask_first:3", "zero_massive"], "perturb": 3},
        }
        for way, options in ways.items():
            with _or_error(one, way):
                one[way] = _measured(model, TOKENS, eps=0.1, **options)
        for dtype in (torch.bfloat16, torch.float64):
            with _or_error(one, str(dtype)):
                one[str(dtype)] = _measured(load_run(run).model.to(dtype), TOKENS, eps=0.1, details=True)
    return found


def callback() -> Any:
    """Logs of an evaluation after `SinkCallback.on_log`."""

    def case(model: Any) -> Any:
        callback, logs = sinklab.SinkCallback(TOKENS, eps=0.1, batch_size=3), {"eval_loss": 1.0}
        from transformers.trainer_callback import TrainerControl, TrainerState

        state = TrainerState()
        state.log_history = [{"eval_loss": 1.0}]
        callback.on_log(None, state, TrainerControl(), logs=logs, model=model)  # type: ignore[arg-type]
        return [logs, state.log_history]

    return _each(case)


def hashes() -> Any:
    """Content hashes of the recorded variants' recipes and of shipped recipes."""
    load_recipe = _found("load_recipe")
    names = [str(path) for path in sorted(Path("recipes").glob("*.yaml"))] + ["tiny", "mini", "small", "60m", "1b"]
    return {name: load_recipe(name).content_hash("0" * 64) for name in names}


def families() -> Any:
    """Measurements of every family in small batches, with lengths and maps."""
    found: dict[str, Any] = {}
    for name in FAMILIES:
        with _or_error(found, name):
            way = {"eps": [0.1, 0.3], "lengths": [4, 9], "batch_size": 3, "maps": [(1, 1)]}
            found[name] = _measured(_model(f"models/{name}"), TOKENS, **way)
    return found


CASES: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (padding, generation, gradients, nested, dtypes, own, callback, hashes, families)
}
