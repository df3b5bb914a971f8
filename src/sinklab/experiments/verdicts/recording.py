"""Recording the spread of seeds at a scale from the runs of a sweep."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from sinklab.errors import InputError
from sinklab.experiments.definition import Scale
from sinklab.experiments.results import CellResults
from sinklab.experiments.verdicts.estimates import SeedSpread
from sinklab.experiments.verdicts.observations import observe
from sinklab.experiments.verdicts.recorded import QuantitySpread, RecordedSpread, RecordedSpreads, steps_at
from sinklab.files import parse_json, write_json


def record_spreads(path: Path, scale: Scale, results: Mapping[str, CellResults], names: Iterable[str]) -> None:
    """Write what the cells of a sweep say of the spread of seeds into `spread.json`; other scales there stay.

    Args:
        results: by cell; runs that are not as long as the scale's recipe are left out.
        names: of the quantities.

    Raises:
        InputError: what stands at `path` is no such file.
    """
    before = _read(path)
    own = {
        cell: replace(one, numbers=[run for run in one.numbers if run.last.step == steps_at(scale)])
        for cell, one in results.items()
    }
    found: dict[str, QuantitySpread] = {}
    for name in names:
        seen = observe(own, name)
        if seen.single or seen.paired:
            found[name] = QuantitySpread(single=_recorded(seen.single), paired=_recorded(seen.paired))
    spreads = before.model_copy(update={"scales": {**before.scales, scale: found}})
    write_json(path, spreads.model_dump(by_alias=True))


def _read(path: Path) -> RecordedSpreads:
    if not path.exists():
        return RecordedSpreads()
    try:
        return RecordedSpreads.model_validate(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(f"{path} holds no spreads of seeds: remove it, or choose another file") from error


def _recorded(spread: SeedSpread | None) -> RecordedSpread | None:
    return RecordedSpread(sd=spread.sd, df=spread.df) if spread else None
