"""The run's tokenizer as AutoTokenizer reads it: it begins a text as the run's sequences began, and no other way."""

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.processors import ByteLevel, TemplateProcessing
from tokenizers.processors import Sequence as InTurn

from sinklab.data.tokenizers import Tokenizer
from sinklab.files import write_json


def write_tokenizer(tokenizer: Tokenizer, folder: Path, bos: bool, context: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        bos: whether the run's sequences began with BOS; a text then does by default, and otherwise does not.
        context: tokens that the model was trained on at a time.
    """
    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.post_processor = _beginning(tokenizer, bos)
    backend.save(str(folder / "tokenizer.json"))
    names = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{name: tokenizer.token(number) for name, number in names.items()},
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )


def _beginning(tokenizer: Tokenizer, bos: bool) -> InTurn:
    """What is added to a text's tokens. ByteLevel adds nothing: it is there because a processor must be."""
    if not bos:
        return InTurn([ByteLevel(trim_offsets=False)])
    token = tokenizer.token(tokenizer.bos_id)
    template = TemplateProcessing(
        single=f"{token}:0 $A:0", pair=f"{token}:0 $A:0 $B:1", special_tokens=[(token, tokenizer.bos_id)]
    )
    return InTurn([template])
