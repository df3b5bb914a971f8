"""Training steps of small recipes on a CPU, compared with Hugging Face's Llama of the same sizes, and their profile.

    python -m benchmarks.train_cpu [--recipes tiny tiny-128] [--rounds 9] [--steps 8] [--threads 2] [--save]

`sinklab` is the step of `sinklab train`: batch from the loader, loss, backward pass, check, clipping, AdamW. `llama` is
a plain loop on the same batches: `LlamaForCausalLM` with sdpa attention, `F.cross_entropy`, clipping, the same fused
AdamW, and the loss read at every step. Two further sides are `llama` with glibc's memory kept between steps, as
`sinklab` does (`keep_freed_memory`), and `sinklab` with `train.compile: loss`. Each side has its own process; the sides
run in turn. Goals for `sinklab` over `llama`: 1.25 times the tokens per second in bfloat16, 1.10 times in float32.

The profile is PyTorch's, as a share of time for each part of the model, forward and backward pass together. `kernels`
is the share of matrix products and PyTorch's fused attention, which both models use.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.timing import RESULTS, environment, in_turn, ratios
from sinklab.data.prepare import prepared
from sinklab.device import keep_freed_memory
from sinklab.files import write_json
from sinklab.model import transformer
from sinklab.model.block import DecoderBlock
from sinklab.train import update
from sinklab.train.recipe import Recipe, load_recipe
from sinklab.train.run import open_run
from sinklab.train.update import Updater

GOALS = {"fp32": 1.10, "bf16": 1.25}
RECIPES = ("tiny", "tiny-128", "mini")
COMPILED = "sinklab, loss compiled"
SIDES = ("llama", "llama, memory kept", "sinklab", COMPILED)
KERNELS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_linear")
PART = "part: "
BACKWARD = "autograd::engine::evaluate_function"


def ours(recipe: Recipe, folder: Path) -> Updater:
    """Return the updater of a new run in `folder`."""
    return Updater(open_run(recipe, prepared(recipe.data), folder))


def theirs(recipe: Recipe, updater: Updater) -> Callable[[], float]:
    """Return a function that does one step of the plain loop on the batches of `updater` and returns the loss."""
    model, optim = updater.recipe.model, recipe.optim
    assert optim.name == "adamw"
    config = LlamaConfig(
        vocab_size=model.vocab_size or 0,
        hidden_size=model.width,
        intermediate_size=model.ffn_width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.key_heads,
        max_position_embeddings=model.context,
        rms_norm_eps=model.norm.eps,
        tie_word_embeddings=False,
        use_cache=False,
    )
    config._attn_implementation = "sdpa"
    llama = LlamaForCausalLM(config)
    assert sum(p.numel() for p in llama.parameters()) == sum(p.numel() for p in updater.model.parameters())
    optimizer = torch.optim.AdamW(
        llama.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay, fused=True
    )
    done = [0]

    def step() -> float:
        tokens_BT = updater.batches._fetch(done[0])
        done[0] += 1
        with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16"):
            logits_BTV = llama(input_ids=tokens_BT[:, :-1]).logits
            loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), optim.clip or 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def side(name: str, recipe_name: str, precision: str, threads: int, pipe: Connection) -> None:
    """Run the process of one side: for every number of steps received, do these steps and send it back; 0 ends it."""
    torch.set_num_threads(threads)
    if name != "llama":
        keep_freed_memory()
    compiled = "loss" if name == COMPILED else "off"
    recipe = load_recipe(recipe_name, [f"train.precision={precision}", f"train.compile={compiled}"])
    with tempfile.TemporaryDirectory() as folder:
        updater = ours(recipe, Path(folder))
        step = theirs(recipe, updater) if name.startswith("llama") else updater.update
        while steps := pipe.recv():
            repeated(step, steps)()
            pipe.send(steps)


@contextmanager
def sides(recipe: str, precision: str, threads: int, steps: int) -> Iterator[dict[str, Callable[[], None]]]:
    """Start the process of each side, and yield functions that do `steps` steps in it, by side."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    with ExitStack() as stack:
        for name in SIDES:
            pipes[name], theirs_end = context.Pipe()
            process = context.Process(target=side, args=(name, recipe, precision, threads, theirs_end), daemon=True)
            process.start()
            theirs_end.close()  # in this process, so that `recv` fails if the other process dies
            stack.callback(process.join)
            stack.callback(pipes[name].send, 0)

        def taking(pipe: Connection) -> Callable[[], None]:
            def work() -> None:
                pipe.send(steps)
                pipe.recv()

            return work

        yield {name: taking(pipe) for name, pipe in pipes.items()}


def repeated(step: Callable[[], object], times: int) -> Callable[[], None]:
    """Return a function that calls `step` several times."""

    def work() -> None:
        for _ in range(times):
            step()

    return work


def parts_of(updater: Updater, steps: int) -> tuple[dict[str, float], float]:
    """Profile `steps` updates; return the share of time (0..1) in each part of the model, and in KERNELS."""
    for block in updater.model.blocks:
        assert isinstance(block, DecoderBlock)
        for owner, method, part in (
            (block.attention, "inputs", "attention: projections, rotary"),
            (block.attention, "output", "attention: projections, rotary"),
            (block.attention.core, "forward", "attention: core"),
            (block.ffn, "forward", "ffn"),
            (block.attention_norm, "forward", "norm"),
            (block.ffn_norm, "forward", "norm"),
        ):
            _name(owner, method, part)
    _name(updater.model.final_norm, "forward", "norm")
    _name(transformer, "next_token_loss", "head and loss")
    _name(updater.optimizer, "step", "optimiser")
    _name(update.torch.nn.utils, "get_total_norm", "clip")
    _name(update.torch.nn.utils, "clip_grads_with_norm_", "clip")
    _name(updater.batches, "batch", "loading")
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        repeated(updater.update, steps)()
    events = list(profiler.events() or [])
    return _by_part(events), _in_kernels(events)


def _name(owner: Any, method: str, part: str) -> None:
    """Replace a method by one whose calls are recorded in the profile under the name of its part."""
    function = getattr(owner, method)

    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(PART + part):
            return function(*args, **kwargs)

    setattr(owner, method, named)


def _by_part(events: list[Any]) -> dict[str, float]:
    """Return the share of time by part.

    The time of an event counts for the part that encloses it, or that enclosed the forward call of a backward event.
    """
    part_of_call = {
        event.sequence_nr: part
        for event in events
        if event.sequence_nr >= 0 and not event.name.startswith(BACKWARD) and (part := _enclosing(event))
    }
    total: dict[str, float] = defaultdict(float)
    for event in events:
        part = _enclosing(event) or part_of_call.get(_backward_of(event), "other")
        total[part] += event.self_cpu_time_total
    whole = sum(total.values())
    return {part: time / whole for part, time in sorted(total.items(), key=lambda item: -item[1])}


def _in_kernels(events: list[Any]) -> float:
    names = {f"aten::{name}{way}" for name in KERNELS for way in ("", "_backward")}
    whole = sum(event.self_cpu_time_total for event in events)
    return sum(event.self_cpu_time_total for event in events if event.name in names) / whole


def _enclosing(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(PART):
            return event.name.removeprefix(PART)
        event = event.cpu_parent
    return None


def _backward_of(event: Any) -> int:
    """Return the sequence number of the forward call whose backward pass contains the event; -1 if there is none."""
    while event is not None:
        if event.name.startswith(BACKWARD):
            return event.sequence_nr
        event = event.cpu_parent
    return -1


def measured(recipe_name: str, precision: str, threads: int, rounds: int, steps: int) -> dict[str, Any]:
    """Return tokens per second of each side, ratios of throughput (median over the rounds), and the profile."""
    recipe = load_recipe(recipe_name, [f"train.precision={precision}", "train.compile=off"])
    tokens = steps * recipe.train.batch_size * recipe.model.context
    with sides(recipe_name, precision, threads, steps) as work:
        seconds = in_turn(work, rounds)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        updater = ours(recipe, Path(folder))
        repeated(updater.update, steps)()
        parts, kernels = parts_of(updater, steps)
    return {
        "tokens_per_second": {name: tokens / sorted(times)[len(times) // 2] for name, times in seconds.items()},
        "times_llama": 1 / ratios(seconds, "llama")["sinklab"],
        "times_llama_with_memory_kept": 1 / ratios(seconds, "llama, memory kept")["sinklab"],
        "times_uncompiled": 1 / ratios(seconds, "sinklab")[COMPILED],
        "kernels": kernels,
        "parts": parts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--precisions", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=8, help="updates per round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/train_cpu.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: dict[str, Any] = {"environment": environment(), "rounds": options.rounds, "steps": options.steps}
    print(json.dumps(result["environment"]))
    for recipe in options.recipes:
        for precision in options.precisions:
            found = measured(recipe, precision, options.threads, options.rounds, options.steps)
            result.setdefault(recipe, {})[precision] = found
            rates = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in found["tokens_per_second"].items())
            mark = "" if found["times_llama"] >= GOALS[precision] else "  below"
            print(f"\n{recipe}, {precision}: {rates}")
            print(f"sinklab is {found['times_llama']:.2f} times as fast (goal {GOALS[precision]}){mark}, ", end="")
            print(f"{found['times_llama_with_memory_kept']:.2f} times where theirs keeps its memory, too")
            print(f"with the loss compiled {found['times_uncompiled']:.2f} times as fast as without")
            print(f"matrix products and attention: {found['kernels']:.1%} of ours")
            for part, share in found["parts"].items():
                print(f"  {part:32}{share:7.1%}", flush=True)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / "train_cpu.json", result)


if __name__ == "__main__":
    main()
