"""The cost and benefit of a sink: streaming, eviction, quantisation, length, key ablations, and the role of each head.

A `Patient` is a causal language model whose attention can be replaced layer by layer (own.py, foreign.py); a `Change`
computes a layer's attention in its own way (layers.py). A part (part.py, parts/) reads the same text under several
changes and compares loss and Kullback-Leibler divergence with the unchanged model (reading.py). Formulas:
docs/assess.md.
"""
