"""Instruction tuning of a model on conversations, with measurements of its sink (docs/sft.md)."""
