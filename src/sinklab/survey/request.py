"""The request of a measurement: the sequences that a model reads, and the quantities measured on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sinklab.errors import InputError
from sinklab.measuring.options import Options, Study
from sinklab.settings import ADVANCED, INPUT, CommandSettings, Flag, Seed, SequenceCount, SequenceLength

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.data.sources.textfiles import Render
    from sinklab.measuring.inputs import Encode

DECIDING = (
    "inputs",
    "sequences",
    "length",
    "eps",
    "lengths",
    "no_bos",
    "seed",
    "fewer",
    "loss",
    "study",
    "details",
    "maps",
)
"""The settings that decide the result, in the order of request.json, which is hashed as text."""


class Request(CommandSettings, frozen=True):
    """A request, for one model or many.

    Attributes:
        options: quantities to be measured, and the kind of inputs; lengths in any order.
        sequences, length: N and T.
        no_bos: leave out the special tokens that the tokenizer, or the run's recipe, puts first.
        seed: of random and repeated tokens; for drawn text the number of the draw.
        drawn_text: natural sequences are drawn from all pieces of the text instead of its beginning.
        fewer: accept fewer sequences from a short text, with a note; always the case for drawn text.
        study: ablations and changed positions.
    """

    panel = INPUT

    options: Options = Options()
    sequences: SequenceCount = 100
    length: SequenceLength = 64
    no_bos: bool = Field(default=False, description="Omit the special tokens that the tokenizer prepends.")
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(
        default=0, description="Random seed for random and repeated tokens."
    )
    fewer: bool = False
    drawn_text: bool = False
    study: Study = Study()

    def check(self, text: Path | None) -> None:
        """Refuse a request that no model can answer.

        Raises:
            InputError: natural inputs without a readable text, or an option that `check_options` refuses.
        """
        from sinklab.data.sources.corpora import documents

        self.check_options()
        if self.options.inputs == "natural":
            next(documents(str(self.needed(text))))

    def check_options(self) -> None:
        """Refuse options that are invalid for every model and text.

        Raises:
            InputError: lengths that are not shorter than the sequences, a position beyond them, an unknown ablation or
                one without a loss.
        """
        from sinklab.measuring.surgery.study import check_study

        self._in_order().check_lengths(self.length)
        if self.study.ablate and not (self.options.loss and self.length > 1):
            raise InputError("an ablation shows the change in loss: measure with the loss, on two tokens or more")
        check_study(self.study, self.length)
        if "no_bos" in self.study.ablate and (self.no_bos or self.options.inputs != "natural"):
            why = "--no-bos leaves it out already" if self.no_bos else f"--inputs {self.options.inputs} has none"
            raise InputError(f"--ablate no_bos leaves the BOS out, and {why}: give one of the two")

    def needed(self, text: Path | None) -> Path:
        """The text of natural inputs.

        Raises:
            InputError: no text was given.
        """
        if text is None:
            raise InputError("natural inputs need a text: give --text FILE (.txt or .jsonl), or --inputs random")
        return text

    def text_tokens(
        self, text: Path, encode: "Encode", *, length: int, prefix: Sequence[int] = (), render: "Render"
    ) -> "tuple[Tensor, Tensor | None]":
        """Sequences of the text, and the bytes of text per token (`inputs.sizes_of`), both N x T.

        Args:
            length: tokens per sequence, `prefix` included.

        Raises:
            InputError: as `natural_text` and `drawn_text`.
        """
        from sinklab.measuring.inputs import drawn_text, natural_text, sizes_of, with_prefix

        wanted: dict[str, Any] = {"sequences": self.sequences, "length": length, "prefix": prefix, "render": render}
        if self.drawn_text:
            bodies = drawn_text(text, encode, draw=self.seed, **wanted)
        else:
            bodies = natural_text(text, encode, fewer=self.fewer, **wanted)
        return with_prefix(bodies, prefix), sizes_of(bodies, prefix)

    def drawn(self, vocabulary: int) -> "Tensor | None":
        """Random or repeated tokens; None for natural inputs."""
        from sinklab.measuring.inputs import random_tokens, repeated_tokens

        draw = {"random": random_tokens, "repeat": repeated_tokens}.get(self.options.inputs)
        if draw is None:
            return None
        return draw(vocabulary, sequences=self.sequences, length=self.length, seed=self.seed)

    def options_for(self, model_name: str, bos: bool) -> Options:
        """The options for one model, with its name and BOS."""
        return self._in_order().model_copy(update={"model_name": model_name, "bos": bos})

    def document(self) -> dict[str, Any]:
        """Everything that decides the result, as plain JSON."""
        asked = {name: True for name in ("explore", "gradients") if getattr(self.options, name)}
        found = self.options.model_dump(mode="json") | self.model_dump(mode="json", exclude={"options"})
        if self.study.perturb is None:
            del found["study"]["perturb"]
        drawn = {"drawn_text": "disjoint"} if self.drawn_text else {}
        return {key: found[key] for key in DECIDING} | drawn | asked

    def _in_order(self) -> Options:
        """The options with sorted lengths, without the full length."""
        lengths = tuple(sorted(set(self.options.lengths) - {self.length}))
        return self.options.model_copy(update={"lengths": lengths})
