"""Experiments as data: overlays on a base recipe, and the claims that their results are compared with."""
