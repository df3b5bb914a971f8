"""Settings of a measurement: input sequences, measured quantities and ablations."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from sinklab.errors import InputError
from sinklab.measuring.options import Options, Study
from sinklab.settings import ADVANCED, INPUT, CommandSettings, Flag, Seed, SequenceCount, SequenceLength

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
"""Keys that `Request.document` always contains; others are added if set. Hashes in results depend on the key order."""


class Request(CommandSettings, frozen=True):
    """Settings of a measurement of one or several models.

    Attributes:
        options: measured quantities, and the kind of inputs; `lengths` in any order.
        sequences, length: number of sequences N and tokens per sequence T.
        no_bos: leave out the special tokens at the start of the sequences, which the tokenizer, its chat template, the
            run's recipe or the text itself puts there.
        bos: begin every sequence with BOS, also random and repeated tokens and texts and conversations before which the
            tokenizer or chat template puts none. BOS is included in T.
        seed: random seed of random and repeated tokens, and of tokens that a run's recipe replaces; for drawn text,
            the index of the draw, from 0.
        drawn_text: sample natural sequences from the first 64 N sequences of the text instead of using the first N.
        fewer: accept fewer sequences, with a note, if the text is short; drawn text always accepts fewer.
        study: ablations, and interventions on positional embeddings.
    """

    panel = INPUT

    options: Options = Options()
    sequences: SequenceCount = 100
    length: SequenceLength = 64
    no_bos: bool = Field(default=False, description="Omit BOS and other leading special tokens.")
    bos: bool = Field(default=False, description="Begin every sequence with BOS.")
    seed: Annotated[Seed, Flag(panel=ADVANCED)] = Field(
        default=0, description="Random seed for random and repeated tokens."
    )
    fewer: bool = False
    drawn_text: bool = False
    study: Study = Study()

    def check(self, text: Path | None) -> Path | None:
        """Check the settings, and for natural inputs that the first document of the text can be read.

        Returns:
            The text; for natural inputs without one, the text that comes with sinklab (`default_text`).

        Raises:
            InputError: see `check_options`; also if the inputs are natural and `text` cannot be read.
        """
        from sinklab.data.sources.corpora import default_text, documents

        self.check_options()
        if self.options.inputs == "natural":
            text = text or default_text()
            next(documents(str(text)))
        return text

    def check_options(self) -> None:
        """Check the settings that do not depend on model or text.

        Raises:
            InputError: see `Options.check_lengths` and `Study.check`; also if an ablation is requested without the loss
                or on single tokens, the ablation `no_bos` on sequences without BOS, or both `bos` and `no_bos`.
        """
        self._in_order().check_lengths(self.length)
        if self.study.ablate and not (self.options.loss and self.length > 1):
            raise InputError("an ablation shows the change in loss: measure with the loss, on two tokens or more")
        self.study.check(self.length)
        natural = self.options.inputs == "natural"
        if self.bos and self.no_bos:
            raise InputError("--bos and --no-bos contradict each other: use only one of the two options")
        if "no_bos" in self.study.ablate and (self.no_bos or not (natural or self.bos)):
            why = "--no-bos leaves it out already" if self.no_bos else f"--inputs {self.options.inputs} has no BOS"
            raise InputError(f"--ablate no_bos leaves out BOS, but {why}: use only one of the two options")

    def options_for(self, model_name: str, bos: bool) -> Options:
        """Return a copy of the options for one model, with `model_name`, `bos` and increasing `lengths`."""
        return self._in_order().model_copy(update={"model_name": model_name, "bos": bos})

    def document(self) -> dict[str, Any]:
        """Return the settings that affect the measurement, as a JSON-serializable dict: a part of request.json."""
        asked = {name: True for name in ("explore", "gradients") if getattr(self.options, name)}
        asked |= {"bos": True} if self.bos else {}
        found = self.options.model_dump(mode="json") | self.model_dump(mode="json", exclude={"options"})
        if self.study.perturb is None:
            del found["study"]["perturb"]
        drawn = {"drawn_text": "disjoint"} if self.drawn_text else {}
        return {key: found[key] for key in DECIDING} | drawn | asked

    def _in_order(self) -> Options:
        """Return a copy of the options with `lengths` sorted and without the full length."""
        lengths = tuple(sorted(set(self.options.lengths) - {self.length}))
        return self.options.model_copy(update={"lengths": lengths})
