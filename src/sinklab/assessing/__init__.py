"""Benefit and cost of an attention sink: the loss added by removing it, and the loss that it adds under quantisation.

Most parts of an assessment (part.py, parts/) evaluate the model with edited attention calls (models/hooks.py),
weights or activations, and compare loss and KL divergence with the unchanged model (reading.py). The parts `heads` and
`length` measure the unchanged model. Formulas: docs/assess.md.
"""
