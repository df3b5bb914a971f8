"""Decision rule for claims (docs/verdicts.md); the entry point is `judging.judge`."""

RULE = (
    "Each seed counts as one number: the mean of the last three evaluations of its run, except for numbers that are "
    "measured once. For existing models, the replicates are draws of sequences, or the models, instead of seeds.",
    "A statement about one model is reproduced if it is true at every seed, contradicted if it is true at none, and "
    "inconclusive otherwise.",
    "A comparison of two cells is reproduced if every seed of one is above every seed of the other, as claimed, "
    "contradicted if every seed is on the other side, and inconclusive otherwise. The verdict is direction only if "
    "this comparison is reproduced, but not the size, bound or absence that is claimed with it.",
    "With fewer than five seeds, there is no verdict. With nine seeds or more, one seed may deviate.",
    "Confirmatory claims were stated before their runs; all others are exploratory.",
    "The full rule, with its error rates, is in docs/verdicts.md of the sinklab repository.",
)
"""The rule in brief, in sentences for the report."""
