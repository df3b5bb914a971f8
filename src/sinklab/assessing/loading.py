"""A run directory or a Hugging Face model, loaded to be assessed, and text as it reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from sinklab.assessing.layers import Patient
from sinklab.assessing.own import OwnPatient
from sinklab.data.sources.corpora import documents
from sinklab.data.tokenfile import TokenFile
from sinklab.device import pick_device
from sinklab.errors import InputError
from sinklab.measuring.conversations import Conversations
from sinklab.measuring.inputs import Encode, default_prefix, pretrained_encode
from sinklab.models.huggingface.loading import Loading, check_name, check_revision, pick_dtype
from sinklab.survey.items import model_files
from sinklab.survey.loaded import is_run


@dataclass(frozen=True)
class Admitted:
    """A model with what it needs to read text.

    Attributes:
        encode: text to token ids, without special tokens.
        special: how many tokens stand before a sequence's own.
        dressed: puts them there: (N, T - special) -> (N, T).
        render: of conversations.
        held_out: the first so many tokens of the text that a run was validated on; None for what is no run of ours.
        files: changes when the model's files may have changed; None for a model of the hub.
        notes: what a reader must know of how it was loaded.
    """

    patient: Patient
    encode: Encode
    special: int
    dressed: Callable[[Tensor], Tensor]
    conversations: Conversations
    files: str | None
    notes: list[str]
    held_out: Callable[[int], list[int]] | None = None

    def sequences(self, text: Path | None, most: int, length: int, fewest: int = 1) -> Tensor:
        """The text as one stream, cut into `fewest` to `most` sequences of `length` tokens: (N, T).

        Args:
            text: what a run was validated on unless given.

        Raises:
            InputError: too little text, one that cannot be read, or none of a model that has none of its own.
        """
        body = length - self.special
        if body < 2:
            raise InputError(f"sequences of {length} tokens, {self.special} of them special: give longer ones")
        stream = self._stream(text, most * body)
        count = min(most, len(stream) // body)
        if count < fewest:
            raise InputError(
                f"{text or 'what the run was validated on'} has {len(stream):,} tokens and {fewest * body:,} are "
                f"needed ({fewest} of {body:,} tokens): give more text, or shorter sequences and caches (--length, "
                "--stream-length, --cache)"
            )
        return self.dressed(torch.tensor(stream[: count * body]).view(count, body))

    def _stream(self, text: Path | None, tokens: int) -> list[int]:
        """At least so many tokens, or all that there are."""
        if text is None:
            if self.held_out is None:
                raise InputError(
                    f"--text is needed: {self.patient.name} is no run, whose validation text could be read"
                )
            return self.held_out(tokens)
        stream: list[int] = []
        for document in documents(str(text), render=self.conversations.render):
            stream += self.encode(f"{document}\n\n")
            if len(stream) >= tokens:
                break
        return stream


def admit(name: str, loading: Loading) -> Admitted:
    """Load a model and see that it can be taken apart.

    Raises:
        InputError: it cannot be loaded or taken apart.
    """
    check_name(name)
    check_revision(name, loading.revision)
    return _run(name, loading) if is_run(name) else _pretrained(name, loading)


def _pretrained(name: str, loading: Loading) -> Admitted:
    from sinklab.assessing.foreign import ForeignPatient
    from sinklab.models.huggingface.loading import load_pretrained

    loaded = load_pretrained(name, loading)
    prefix = torch.tensor(default_prefix(loaded.tokenizer), dtype=torch.long)
    return Admitted(
        ForeignPatient(loaded.model, name),
        pretrained_encode(loaded.tokenizer),
        len(prefix),
        lambda bare_NS: torch.cat((prefix.expand(len(bare_NS), -1), bare_NS), 1),
        Conversations(loaded.tokenizer, keep_bos=not len(prefix)),
        model_files(Path(name)),
        loaded.notes,
    )


def _run(name: str, loading: Loading) -> Admitted:
    from sinklab.data.loader import Loader
    from sinklab.data.tokenizers import load_tokenizer
    from sinklab.train.directory.run import load_run, validation_tokens

    where, kind = pick_device(loading.device), pick_dtype(loading.dtype)
    run = load_run(Path(name))
    tokenizer, data = load_tokenizer(str(run.tokenizer_path)), run.recipe.data
    model = run.model.to(where, kind if isinstance(kind, torch.dtype) else None)

    def dressed(bare_NS: Tensor) -> Tensor:
        loader = Loader(
            bare_NS.flatten().numpy(),
            context=bare_NS.shape[1] + int(data.bos) - 1,
            batch_size=len(bare_NS),
            seed=run.recipe.seed,
            config=data,
            vocab_size=tokenizer.vocab_size,
            bos_id=tokenizer.bos_id,
            shuffle=False,
        )
        return loader.batch(0)

    @cache
    def validated_on() -> TokenFile:  # verified when it is opened, which takes a while where there is much
        return validation_tokens(Path(name))

    def held_out(tokens: int) -> list[int]:
        return validated_on()[:tokens].tolist()

    planned = run.recipe.train.steps
    return Admitted(
        OwnPatient(model, name),
        lambda document: tokenizer.encode_batch([document])[0],
        int(data.bos),
        dressed,
        Conversations(),
        model_files(Path(name)),
        [f"the run stands at step {run.step} of {planned}"] if run.step != planned else [],
        held_out,
    )
