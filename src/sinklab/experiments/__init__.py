"""Experiments as data: cells (overlays on a base recipe, or measurements of models), and claims about the results."""
