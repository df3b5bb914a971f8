"""Cost of each part of `sinklab assess` relative to a bare forward pass over the same tokens.

    python -m benchmarks.assess MODEL TEXT [--quick] [--parts streaming,eviction] [--rounds 3] [--save NAME]

In every round, a bare forward pass over the part's sequences with the logits of all positions is timed, then the part
as `sinklab assess` runs it. Seconds are processor time, so that other work on the machine does not count; ratios are
medians over the rounds. A row has these values:

    passes          forward passes over the part's sequences, the unchanged model's included, as in the progress bar
    tokens_read     tokens through the first block in all these passes, divided by the tokens of the part's sequences
    forward         seconds of one bare forward pass
    seconds         seconds of the part
    times_forward   seconds of the part divided by those of the bare forward pass
    per_pass        `times_forward` divided by `passes`

By default, a pass of the streaming part has 4 times the tokens of the others. The time of quantisation includes
rounding all weights, and that of writer includes passes over single tokens; both do not depend on the text. The goal is
`per_pass` of at most 1.4 for every part but eviction, which finds heavy hitters query by query.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import RESULTS, environment, in_turn, over_rounds
from sinklab.assessing.assess_model import open_separable
from sinklab.assessing.part import AssessText
from sinklab.assessing.parts import PARTS, USUAL
from sinklab.assessing.reading import PartInput
from sinklab.assessing.settings import AssessOptions, AssessSettings, settings_for
from sinklab.files import write_json
from sinklab.models.adapter import Adapter
from sinklab.models.hooks import hooked
from sinklab.models.huggingface.loading import AS_IT_IS

GOAL = 1.4
SLOWER = ("eviction",)


@contextmanager
def counted_tokens(adapter: Adapter) -> Iterator[list[int]]:
    """Yield a list to which every forward pass in the `with` block appends its tokens through the first block."""
    found: list[int] = []

    def entering(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        found.append(hidden.shape[0] * hidden.shape[1])

    with hooked([adapter.blocks[0].register_forward_pre_hook(entering, with_kwargs=True)]):
        yield found


def bare(adapter: Adapter, tokens_NT: Tensor) -> None:
    """Run forward passes with the logits of all positions, one sequence at a time; `tokens_NT` has shape (N, T)."""
    with torch.no_grad():
        for tokens_1T in tokens_NT.split(1):
            adapter.logits(adapter.hidden(tokens_1T)[0])


def row(text: AssessText, name: str, settings: AssessSettings, rounds: int) -> dict[str, Any]:
    """Measure the cost of one part and return its row (see the module docstring), with the goals missed."""
    part, adapter = PARTS[name], text.model.adapter
    tokens_NT, others_MT = part.text_size(settings).read(text)
    given = PartInput(adapter, settings, tokens_NT, others_MT)
    with counted_tokens(adapter) as tokens:
        part.run(given)
    N, T = tokens_NT.shape
    passes = given.passes.done / N
    sides: dict[str, Callable[[], object]] = {
        "forward": partial(bare, adapter, tokens_NT),
        "part": partial(part.run, given),
    }
    seconds = in_turn(sides, rounds, warm_up=0, clock=time.process_time)
    times = statistics.median(over_rounds(seconds, "part", "forward"))
    found = {
        "part": name,
        "sequences": N,
        "length": T,
        "passes": round(passes, 2),
        "tokens_read": round(sum(tokens) / (N * T), 2),
        "forward": round(statistics.median(seconds["forward"]), 3),
        "seconds": round(statistics.median(seconds["part"]), 2),
        "times_forward": round(times, 2),
        "per_pass": round(times / passes, 2),
    }
    return found | {"misses": ["per_pass"] if name not in SLOWER and times / passes > GOAL else []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run, a model directory, a .gguf file or a name on the hub")
    parser.add_argument("text", type=Path, help=".txt or .jsonl")
    parser.add_argument("--parts", default=",".join(USUAL))
    parser.add_argument("--quick", action="store_true", help="the defaults of `sinklab assess --quick`")
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--save", metavar="NAME", help=f"write {RESULTS.name}/NAME.json")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    options: dict[str, Any] = {"sequences": given.sequences, "length": given.length}
    if given.quick:
        options["quick"] = True
    text = AssessText(open_separable(given.model, AS_IT_IS), given.text)
    settings = settings_for(text.model, AssessOptions(**options))
    result: dict[str, Any] = {
        "environment": environment(),
        "model": Path(given.model).name,
        "text": given.text.name,
        "settings": settings.model_dump(mode="json"),
        "rounds": given.rounds,
        "rows": [],
    }
    for name in given.parts.split(","):
        result["rows"].append(row(text, name, settings, given.rounds))
        print(json.dumps(result["rows"][-1]), flush=True)
    result["seconds"] = round(sum(one["seconds"] for one in result["rows"]), 1)
    print(f"all {len(result['rows'])} parts: {result['seconds']} s of processor time", file=sys.stderr)
    if given.save:
        RESULTS.mkdir(exist_ok=True)
        write_json(RESULTS / f"{given.save}.json", result)


if __name__ == "__main__":
    main()
