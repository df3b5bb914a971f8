"""Downstream tasks: a model's scores on HellaSwag and other tasks of lm-eval, and the sink beside them.

lm-eval (extra `eval`) asks and scores; every answer is kept as soon as it is there (answers.py), so that the same call
goes on after an interruption. HellaSwag is read from a file where there is one (hellaswag.py). Formulas: docs/eval.md.
"""
