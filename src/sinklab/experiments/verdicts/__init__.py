"""Decision rule for claims (docs/verdicts.md); the entry point is `judging.judge`."""
