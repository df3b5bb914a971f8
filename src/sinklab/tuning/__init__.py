"""Instruction tuning on conversations, with measurements of the sink (docs/sft.md)."""
