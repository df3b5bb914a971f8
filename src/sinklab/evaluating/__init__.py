"""Downstream tasks: accuracy of a model on HellaSwag and other lm-eval tasks, with its sink metric.

lm-eval (extra `eval`) builds the requests and computes the metrics. The model's answers are saved as they are computed,
so an interrupted call can be resumed. Formulas: docs/eval.md.
"""
