"""Resumable jobs, and events that report their progress."""
