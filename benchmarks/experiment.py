"""All runs of an experiment that comes with sinklab, two at a time, and its summary as a committed result.

    python -m benchmarks.experiment interventions [--out runs/interventions] [--seeds 1] [--save]

An interrupted call is continued by the same call.
"""

import argparse
import time
from pathlib import Path

from benchmarks.timing import RESULTS, environment
from sinklab.experiments.definition import load_experiment
from sinklab.experiments.pool import Event
from sinklab.experiments.running import prepare_data, runs_of, train_runs
from sinklab.files import write_json


def report(event: Event) -> None:
    """A line per evaluation and per end of a run."""
    if event.row is not None or event.kind not in ("step", "row"):
        row = event.row or {}
        sinks = row.get("sink_rate") or [float("nan")]
        print(f"{event.run:24} {event.kind:8} step {event.step:5} Sink_1 {sinks[0]:6.2f} % {event.message}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cells", nargs="+", help="only these")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}/EXPERIMENT.json")
    options = parser.parse_args()
    experiment = load_experiment(options.experiment)
    out = options.out or Path("runs") / experiment.id
    wanted = options.cells or experiment.cells
    runs = [run for run in runs_of(experiment, out, options.seeds, {}) if run.recipe.name in wanted]
    start = time.perf_counter()
    prepare_data(runs)
    summary = train_runs(experiment, runs, out, options.jobs, report)
    if options.save:
        result = {"environment": environment(), "seconds": time.perf_counter() - start, "summary": summary.model_dump()}
        write_json(RESULTS / f"{experiment.id}.json", result)


if __name__ == "__main__":
    main()
