"""A run directory or any model that `measure` takes, as transformers calls it."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from sinklab.export.directory import export_run
from sinklab.models.huggingface.loading import Loading, Pretrained, check_name, check_revision, load_pretrained
from sinklab.survey.items import model_files
from sinklab.survey.loaded import is_run


@dataclass(frozen=True)
class Candidate:
    """A loaded model.

    Attributes:
        name: as the user calls it.
        loading: how it was loaded.
        files: changes when its files may have changed; None for a model of the hub.
    """

    name: str
    loading: Loading
    pretrained: Pretrained
    files: str | None

    @property
    def asked(self) -> dict[str, str | None]:
        """What decides its answers."""
        loading, commit = self.loading, self.pretrained.commit
        return {"model": self.name, "files": self.files, "commit": commit, "dtype": loading.dtype}


def load_candidate(name: str, loading: Loading) -> Candidate:
    """Load a model; a run becomes what `sinklab export` makes of its newest checkpoint.

    Raises:
        InputError: it cannot be loaded.
        SinklabError: none of a run's checkpoints is valid.
    """
    check_name(name)
    check_revision(name, loading.revision)
    files = model_files(Path(name).expanduser())
    if not is_run(name):
        return Candidate(name, loading, load_pretrained(name, loading), files)
    with tempfile.TemporaryDirectory() as folder:
        exported = export_run(Path(name), Path(folder) / "model")
        loaded = load_pretrained(str(exported.directory), loading)
    note = f"the run was evaluated at step {exported.step}, as {exported.architecture}"
    return Candidate(name, loading, replace(loaded, notes=[*loaded.notes, note]), files)
