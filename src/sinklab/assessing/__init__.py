"""Cost and benefit of a sink: streaming, eviction, quantisation, length, key ablations, and head roles.

A part (part.py, parts/) reads the text with edited or replaced attention calls (models/intercept.py), and compares
loss and Kullback-Leibler divergence with the unchanged model (reading.py).
Formulas: docs/assess.md.
"""
