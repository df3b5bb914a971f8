"""Decision rule for claims (docs/verdicts.md). The entry point is `judging.judge`."""
