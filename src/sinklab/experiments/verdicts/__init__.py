"""How claims are judged: the rule of docs/verdicts.md as code. `judging.judge` is the way in."""
