"""Data pipeline: corpora, tokenizers, token shards, the random-access loader and its interventions."""
