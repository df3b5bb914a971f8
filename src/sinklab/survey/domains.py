"""Measure a model on each file of a folder: one measurement per domain."""

from functools import cache, partial
from pathlib import Path, PurePosixPath

from sinklab.data.sources.rows import without_kind
from sinklab.data.sources.textfiles import notes_on_folder, text_files
from sinklab.errors import InputError
from sinklab.jobs import JobEvent, Observer, ignore
from sinklab.measuring.measurement import Measurement
from sinklab.models.hooks import Progress
from sinklab.models.huggingface.loading import AS_IT_IS, Loading, check_name, name_in_results
from sinklab.opening import Model, open_model
from sinklab.survey.measure_many import Item, Survey, deciding_request, measure_all, text_hash
from sinklab.survey.measure_one import measure_loaded
from sinklab.survey.request import Request
from sinklab.survey.suites import DomainsDocument


def measure_domains(
    model: str,
    folder: Path | None,
    request: Request,
    *,
    loading: Loading = AS_IT_IS,
    out: Path | None = None,
    observe: Observer = ignore,
) -> Survey:
    """Measure a model on every text file in or below a folder (`domain_files`), and save domains.json.

    A domain has fewer sequences than requested if its file is too short.

    Raises:
        InputError: see `measure_all` and `Request.check_options`; also if `folder` is not a folder of texts, the inputs
            are not natural, or all domains fail. If only some fail, the results list them with the reasons.
        HeldError, UnsavedError: see `measure_all`.
        SinklabError: see `measure_all` and `open_model`.
    """
    if folder is None or not folder.is_dir():
        got = "" if folder is None else f"; got {folder}"
        raise InputError(f"--by-domain needs --text FOLDER, a folder of text files{got}")
    if request.options.inputs != "natural":
        raise InputError(f"--by-domain measures text: remove --inputs {request.options.inputs}")
    check_name(model)
    request.check_options()
    request = request.model_copy(update={"fewer": True})

    @cache
    def opened() -> Model:
        return open_model(model, loading)

    def measure(file: Path, progress: Progress) -> Measurement:
        return measure_loaded(opened(), file, request, progress)

    items = [
        Item(name, deciding_request(model, Path(model), text_hash(file), loading, request), partial(measure, file))
        for name, file in domain_files(folder).items()
    ]
    for note in notes_on_folder(folder):
        observe(JobEvent("noted", text=note))
    header = {"model": name_in_results(model, loading.subfolder), "text": str(folder)}
    result_of = partial(Survey, DomainsDocument, header, lambda _, measured: measured.document())
    domains = measure_all(items, result_of, out, DomainsDocument.file, observe, prepare=lambda _: opened())
    domains.outcome.check_any("domains")
    return domains


def domain_files(folder: Path) -> dict[str, Path]:
    """Return the text files in and below a folder by domain: the file's path in the folder.

    The suffixes are removed unless two files differ only in it, or a folder with texts has the same name.

    Raises:
        InputError: if the folder has no text file.
    """
    files = text_files(folder)
    bare = [without_kind(file.relative_to(folder)).as_posix() for file in files]
    nested = {parent.as_posix() for name in bare for parent in PurePosixPath(name).parents}
    return {
        name if bare.count(name) == 1 and name not in nested else file.relative_to(folder).as_posix(): file
        for name, file in zip(bare, files, strict=True)
    }
