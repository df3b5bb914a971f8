"""Instruction tuning on conversations, with the sink beside the loss: docs/sft.md."""
