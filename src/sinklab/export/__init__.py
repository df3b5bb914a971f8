"""Export of a run as a Hugging Face model directory."""
