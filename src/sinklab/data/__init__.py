"""Data pipeline: corpora, tokenizers, token shards, and a random-access loader with data interventions."""
