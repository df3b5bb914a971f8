"""What a sink costs and buys: streaming, eviction, quantisation, length, what the sink carries, and what heads do.

A `Patient` is a causal language model whose attention can be replaced layer by layer (own.py, foreign.py); a `Change`
computes a layer's attention in its own way (layers.py). A part reads the same text under several changes and holds
loss and Kullback-Leibler divergence against the unchanged model (reading.py). Formulas: docs/assess.md.
"""
