"""Compare the loss on a few sequences with and without BOS, where a model is fed other special tokens than its BOS.

Some models need BOS: without it, the loss of Gemma 3 and 4 is several nats higher. A tokenizer or a chat template that
leaves it out, or writes it twice, changes both the loss and the sink.
"""

from collections.abc import Sequence

from sinklab.measuring.driver import measure
from sinklab.measuring.inputs import Encoded, token_rows
from sinklab.measuring.measurement import Measurement
from sinklab.measuring.options import Options
from sinklab.opening import Model
from sinklab.survey.request import Request

SEQUENCES = 8
LENGTH = 64
NATS = 0.1
"""Difference in loss, in nats per token, from which there is a note."""


def bos_notes(model: Model, rows: Sequence[Encoded], request: Request) -> list[str]:
    """Return a note if BOS at the start of the sequences reduces the loss by NATS or more.

    The loss is measured on the first SEQUENCES sequences of at most LENGTH tokens, with the special tokens that were
    fed and with one BOS instead of them, on the same targets. The BOS is that of the tokenizer or of the config. The
    result is empty if exactly this BOS was fed, for runs, which have the BOS of their recipe, without a loss, and with
    `no_bos`, which is a choice.
    """
    adapter, has_loss = model.adapter, request.options.loss and model.adapter.has_head
    if model.planned_steps is not None or request.no_bos or not has_loss or adapter.first_target > 2:
        return []
    prefix = rows[0].prefix if rows else ()
    others = [(bos,) for bos in model.bos_ids if (bos,) != prefix]
    body = min(request.length, LENGTH, adapter.limit or LENGTH) - max(len(prefix), 1)
    if not rows or not others or body < 2:
        return []
    few = [row.ids[:body] for row in rows if row.prefix == prefix][:SEQUENCES]

    def read(special: tuple[int, ...]) -> Measurement:
        tokens_NT = token_rows([Encoded(special, ids) for ids in few])
        options = Options(eps=request.options.eps, first_target=len(special) + 2)
        return measure(adapter, tokens_NT, options)

    fed = read(prefix)
    with_bos, best = min(((read(other), other) for other in others), key=lambda one: one[0].loss or 0)
    assert fed.loss is not None
    assert with_bos.loss is not None
    if fed.loss - with_bos.loss < NATS:
        return []
    (name,) = model.token_texts(list(best))
    written = "".join(model.token_texts(list(prefix))) or "no BOS"
    why = "the tokenizer or chat template does not put it first; to add it: --bos"
    if prefix:
        why = f"the text, the tokenizer or the chat template puts {written} first"
    return [
        f"the model needs its BOS {name}: with {written} the loss is {fed.loss - with_bos.loss:.2f} nats per token "
        f"higher than with {name} ({fed.loss:.2f} and {with_bos.loss:.2f}, {len(few)} sequences of {body} tokens), and "
        f"Sink_1 is {fed.sink_rate[0]:.1f} % instead of {with_bos.sink_rate[0]:.1f} %; {why}"
    ]
