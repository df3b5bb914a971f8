"""One model on many texts: a measurement per file of a folder, the model loaded once.

Every file gives as many sequences as it has, up to the number asked for: domains differ in size, and the number is
part of the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sinklab.data.sources.corpora import identity
from sinklab.data.sources.textfiles import text_files
from sinklab.errors import InputError
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, name_in_results
from sinklab.opening import Model
from sinklab.survey.items import Item, Listener, Outcome, measure_all, what_decides
from sinklab.survey.loaded import load_model, measure_loaded
from sinklab.survey.request import Request

DOCUMENT = "domains.json"


@dataclass(frozen=True)
class Domains:
    """The result: the measurement of every domain, by its name."""

    model: str
    text: str
    outcome: Outcome

    def document(self) -> dict[str, Any]:
        """What `domains.json` holds."""
        return {
            "schema": 1,
            "model": self.model,
            "text": self.text,
            "domains": {name: measured.document() for name, measured in self.outcome.measured.items()},
            "failed": self.outcome.failed,
        }


def measure_domains(
    model: str,
    folder: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    listener: Listener | None = None,
) -> Domains:
    """Measure `model` on every .txt and .jsonl file below `folder`; each file is a domain, named by its path.

    Args:
        model: a run directory, a model directory, or a name on the Hugging Face hub.
        out: keeps each domain's measurement in a folder of its name, and `domains.json`; continues what it finds.

    Raises:
        InputError: not a folder of texts, not natural inputs, a model or option that cannot be used, or results of
            other settings in `out`. A domain that cannot be measured is among the failed ones instead.
        UnsavedError: a result could not be saved; it holds the domains so far.
    """
    if folder is None or not folder.is_dir():
        raise InputError(f"--by-domain needs --text FOLDER, a folder of .jsonl or .txt files; got {folder}")
    if request.options.inputs != "natural":
        raise InputError(f"--by-domain measures text: leave out --inputs {request.options.inputs}")
    check_name(model)
    request.check_options()
    request = request.model_copy(update={"fewer": True})
    loaded: list[Model] = []

    def prepare(_: Sequence[str]) -> None:
        loaded.append(load_model(model, loading, request=request, text=folder))

    def measure(file: Path, progress: Progress) -> Measurement:
        return measure_loaded(loaded[0], file, request, progress)

    items = [
        Item(
            name,
            what_decides(model, Path(model).expanduser(), identity(str(file)), loading, request),
            partial(measure, file),
        )
        for name, file in domain_files(folder).items()
    ]
    result_of = partial(Domains, name_in_results(model, loading.subfolder), str(folder))
    domains = measure_all(items, result_of, out, DOCUMENT, listener, prepare=prepare)
    if not domains.outcome.measured:
        name, failure = next(iter(domains.outcome.failed.items()))
        raise InputError(f"none of the {len(items)} domains could be measured; {name}: {failure}")
    return domains


def domain_files(folder: Path) -> dict[str, Path]:
    """The files below a folder by the names of their domains: paths without suffix, where that tells them apart.

    Raises:
        InputError: there is no .txt or .jsonl file.
    """
    files = text_files(folder)
    bare = [file.relative_to(folder).with_suffix("").as_posix() for file in files]
    return {
        name if bare.count(name) == 1 else file.relative_to(folder).as_posix(): file
        for name, file in zip(bare, files, strict=True)
    }
