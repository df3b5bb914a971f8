"""Changes of a model within a `with` block: its behaviour without a part shows the use of that part.

    with masked_first_keys(model, 4):            # no query after the fourth sees the first four keys
    with zeroed(model, layer=2, position=1, dimension=447):
    with swapped_positions(model, 1, 5):         # learned positions; replaced_position(model, 1, 5) for p_1 := p_5

Each works on a Hugging Face causal language model and on ours, around a probe or inside of one, and leaves the model
as it was found, also after an exception. Positions and layers are 1-based, as in the results; with padding position 1
is the first real token of each sequence. Sequences are read whole, without a cache.
"""

from sinklab.measuring.surgery.changes import masked_first_keys, replaced_position, swapped_positions, zeroed

__all__ = ["masked_first_keys", "replaced_position", "swapped_positions", "zeroed"]
