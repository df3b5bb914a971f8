"""What is measured: a Hugging Face model or a run directory, loaded once and asked as often as wanted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from sinklab.data.sources.corpora import documents
from sinklab.data.sources.textfiles import text_files
from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.measuring.conversations import Conversations
from sinklab.measuring.hooks import Progress, check_eps, check_lengths
from sinklab.measuring.huggingface.loading import Loading, check_revision
from sinklab.measuring.inputs import default_prefix, natural_tokens, pretrained_encode, random_tokens, repeated_tokens
from sinklab.measuring.measurement import Inputs, Measurement
from sinklab.measuring.surgery.study import Study, examine

if TYPE_CHECKING:
    from sinklab.data.config import DataConfig
    from sinklab.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Request:
    """What is asked of a model, whichever it is.

    Attributes:
        inputs: what the sequences are made of.
        sequences, length: N and T.
        eps: thresholds of the sink rate; the first is the headline.
        lengths: cut the same sequences at these lengths as well, in the same pass.
        no_bos: leave out the special tokens that the tokenizer, or the run's recipe, puts first.
        seed: of random and repeated tokens.
        fewer: be content with fewer sequences where a text has no more, and say so in the notes.
        loss: False leaves it out, and with it the logits.
        batch_size: changes memory and speed, not the result; default: as many as fit the memory, at most 16.
        study: ablations and changed positions.
        details, maps: see `measure_pretrained`.
    """

    inputs: Inputs = "natural"
    sequences: int = 100
    length: int = 64
    eps: float | Sequence[float] = (0.3,)
    lengths: Sequence[int] = ()
    no_bos: bool = False
    seed: int = 0
    fewer: bool = False
    loss: bool = True
    batch_size: int | None = None
    study: Study = field(default_factory=Study)
    details: bool = False
    maps: Sequence[tuple[int, int]] = ()

    def check(self, text: Path | None) -> None:
        """Refuse what no model could answer, before one is loaded.

        Raises:
            InputError: natural inputs without a text that can be read, or an option that `check_options` refuses.
        """
        self.check_options()
        if self.inputs == "natural":
            next(documents(str(self.needed(text))))

    def check_options(self) -> None:
        """Refuse options that go with no model and no text.

        Raises:
            InputError: no share of attention, lengths that are not shorter, a position beyond the sequences, ablations
                that are unknown or without a loss.
        """
        check_eps(self.eps)
        check_lengths(self.shorter(), self.length)
        if self.study.ablate and not (self.loss and self.length > 1):
            raise InputError("an ablation shows the change in loss: measure with the loss, on two tokens or more")
        self.study.check(self.length)

    def needed(self, text: Path | None) -> Path:
        """The text of natural inputs.

        Raises:
            InputError: there is none.
        """
        if text is None:
            raise InputError("natural inputs need a text: give --text FILE (.txt or .jsonl), or --inputs random")
        return text

    def drawn(self, vocabulary: int) -> Tensor | None:
        """Random or repeated tokens; None where text is wanted."""
        draw = {"random": random_tokens, "repeat": repeated_tokens}.get(self.inputs)
        if draw is None:
            return None
        return draw(vocabulary, sequences=self.sequences, length=self.length, seed=self.seed)

    def shorter(self) -> list[int]:
        """The lengths in order, without the full one."""
        return sorted(set(self.lengths) - {self.length})

    def options(self) -> dict[str, Any]:
        """What every measuring function takes."""
        return {
            "eps": self.eps,
            "batch_size": self.batch_size,
            "loss": self.loss,
            "inputs": self.inputs,
        }


class Subject(Protocol):
    """A loaded model, which can be asked more than once."""

    def measure(self, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
        """Measure it.

        Args:
            text: a .txt or .jsonl file or a folder of them; needed for natural inputs only.
            progress: called with (sequences done, sequences in all).

        Raises:
            InputError: a text or option that cannot be used.
            SinklabError: the model cannot be measured.
        """
        ...


def load_subject(name: str, loading: Loading) -> Subject:
    """Load a run directory (it has a recipe.yaml), a model directory or .gguf file, or a model of the hub by its name.

    Raises:
        InputError: it cannot be loaded.
    """
    check_revision(name, loading.revision)
    if (Path(name) / "recipe.yaml").is_file():
        return _Run(name, loading)
    return _Pretrained(name, loading)


class _Pretrained:
    """A Hugging Face model with its tokenizer."""

    def __init__(self, name: str, loading: Loading) -> None:
        from sinklab.measuring.huggingface.loading import load_pretrained

        self._name, self._revision = name, loading.revision
        self._loaded = load_pretrained(name, loading)
        self._model, self._tokenizer = self._loaded.model, self._loaded.tokenizer

    def measure(self, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
        from sinklab.measuring.huggingface.context import check_length
        from sinklab.measuring.huggingface.loading import vocabulary_size
        from sinklab.measuring.pretrained import measure_pretrained

        check_length(self._model.config, request.length)
        special = default_prefix(self._tokenizer)
        conversations = Conversations(self._tokenizer, keep_bos=not (special or request.no_bos))
        tokens_NT, prefix = request.drawn(min(len(self._tokenizer), vocabulary_size(self._model))), []
        if tokens_NT is None:
            text = request.needed(text)
            prefix = [] if request.no_bos else special
            tokens_NT = natural_tokens(
                text,
                pretrained_encode(self._tokenizer),
                sequences=request.sequences,
                length=request.length,
                prefix=prefix,
                fewer=request.fewer,
                render=conversations.render,
            )
        bos_tokens = len(prefix) or int(conversations.bos)
        measurement = examine(
            self._model,
            tokens_NT,
            partial(measure_pretrained, self._model, bos=bos_tokens > 0, model_name=self._name, **request.options()),
            request.study,
            bos_tokens=bos_tokens,
            lengths=request.shorter(),
            details=request.details,
            maps=request.maps,
            progress=progress,
        )
        found = {"revision": self._revision, "commit": self._loaded.commit}
        return _annotated(measurement.model_copy(update=found), request, text, conversations, self._loaded.notes)


class _Run:
    """A run directory of ours."""

    def __init__(self, name: str, loading: Loading) -> None:
        from sinklab.data.tokenizers import load_tokenizer
        from sinklab.measuring.huggingface.loading import pick_dtype
        from sinklab.train.directory.run import load_run

        where, kind = pick_device(loading.device), pick_dtype(loading.dtype)
        self._name, run = name, load_run(Path(name))
        self._recipe, self._step = run.recipe, run.step
        self._tokenizer = load_tokenizer(str(run.tokenizer_path))
        self._model = run.model.to(where, kind if isinstance(kind, torch.dtype) else None)

    def measure(self, text: Path | None, request: Request, progress: Progress | None = None) -> Measurement:
        from sinklab.measuring.native import measure_transformer

        context = self._recipe.model.context
        if request.length > context:
            raise InputError(
                f"--length {request.length} is beyond the context of {self._name}: give at most --length {context}"
            )
        tokens_NT, bos, conversations = request.drawn(self._tokenizer.vocab_size), False, Conversations()
        if tokens_NT is None:
            text = request.needed(text)
            bos = self._recipe.data.bos and not request.no_bos
            data = self._recipe.data.model_copy(update={"bos": bos})
            tokens_NT = _as_trained(text, request, data, self._tokenizer, conversations)
        measurement = examine(
            self._model,
            tokens_NT,
            partial(measure_transformer, self._model, bos=bos, model_name=self._name, **request.options()),
            request.study,
            bos_tokens=int(bos),
            lengths=request.shorter(),
            details=request.details,
            maps=request.maps,
            progress=progress,
        )
        at_step = measurement.of_step(self._step, self._recipe.train.steps)
        return _annotated(at_step, request, text, conversations)


def _as_trained(
    text: Path, request: Request, data: "DataConfig", tokenizer: "Tokenizer", conversations: Conversations
) -> Tensor:
    """Text as the run saw its own: its tokenizer, and its loader for BOS, fixed and random tokens."""
    from sinklab.data.loader import Loader

    bare_NS = natural_tokens(
        text,
        lambda document: tokenizer.encode_batch([document])[0],
        sequences=request.sequences,
        length=request.length - int(data.bos),
        fewer=request.fewer,
        render=conversations.render,
    )
    loader = Loader(
        bare_NS.flatten().numpy(),
        context=request.length - 1,
        batch_size=len(bare_NS),
        seed=request.seed,
        config=data,
        vocab_size=tokenizer.vocab_size,
        bos_id=tokenizer.bos_id,
        shuffle=False,
    )
    return loader.batch(0)


def _annotated(
    measurement: Measurement,
    request: Request,
    text: Path | None,
    conversations: Conversations,
    loaded: Sequence[str] = (),
) -> Measurement:
    """The measurement with what its reader must know about how the model was loaded, and about the text."""
    notes = [*loaded, *conversations.notes()]
    if request.inputs == "natural" and text is not None and text.is_dir() and len(files := text_files(text)) > 1:
        notes.append(f"the {len(files)} files of {text} gave their sequences in turn, one each time")
    if measurement.sequences < request.sequences:
        notes.append(
            f"{measurement.sequences} of {request.sequences} sequences: the text has no more that are long enough"
        )
    return measurement.model_copy(update={"notes": [*measurement.notes, *notes]}) if notes else measurement
