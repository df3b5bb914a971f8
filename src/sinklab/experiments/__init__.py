"""Experiments as data: overlays on a base recipe, and claims about the results."""
