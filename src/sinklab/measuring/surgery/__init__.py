"""Interventions on a model within a `with` block.

    with masked_first_keys(model, 4):            # no query after the fourth sees the first four keys
    with zeroed(model, layer=2, position=1, dimension=447):
    with swapped_positions(model, 1, 5):         # learned embeddings; also replaced_position(model, 1, 5)

These functions support Hugging Face causal language models, sinklab transformers and exported models (not if loaded
with their own code, `trust_remote_code`). They can be used around or inside a probe, and restore the model afterwards,
also after an exception. Positions and layers are 1-based; with padding, position 1 is the first real token of each
sequence. `masked_first_keys` and `zeroed` do not support a KV cache.
"""

from sinklab.measuring.surgery.changes import masked_first_keys, replaced_position, swapped_positions, zeroed

__all__ = ["masked_first_keys", "replaced_position", "swapped_positions", "zeroed"]
