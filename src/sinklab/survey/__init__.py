"""Measurements of one model, and surveys: domains, checkpoints, comparisons and families of models."""
