"""Cost and benefit of a sink: streaming, eviction, quantisation, length, key ablations, and head roles.

A part (part.py, parts/) runs the model on the text with edited or replaced attention calls (models/intercept.py), and
computes the added loss and the KL divergence relative to the unchanged model (reading.py).
Formulas: docs/assess.md.
"""
