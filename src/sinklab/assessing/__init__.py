"""Cost and benefit of a sink: the loss that a model adds without it, and the loss that it adds in small formats.

A part (part.py, parts/) runs the model on the text with edited attention calls (models/intercept.py), weights or
activations. Most parts compute loss and KL divergence relative to the unchanged model (reading.py).
Formulas: docs/assess.md.
"""
