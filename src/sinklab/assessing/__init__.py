"""Cost and benefit of an attention sink: the loss added by ablating it, and the loss that it adds under quantisation.

Each part (part.py, parts/) evaluates the model with edited attention calls (models/intercept.py), weights or
activations. Most parts compare loss and KL divergence with the unchanged model (reading.py).
Formulas: docs/assess.md.
"""
