"""Experiments as data: cells (changes to a base recipe, or measurements), and claims about the results."""
