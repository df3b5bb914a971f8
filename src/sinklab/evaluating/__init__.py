"""Downstream tasks: scores of a model on HellaSwag and other tasks of lm-eval, with its sink.

lm-eval (extra `eval`) makes the requests and scores them. Every answer is saved as soon as it is computed, so that an
interrupted call resumes. Formulas: docs/eval.md.
"""
