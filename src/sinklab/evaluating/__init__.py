"""Downstream tasks: metrics of a model on HellaSwag and other lm-eval tasks, and its sink metric.

lm-eval (extra `eval`) builds the requests and computes the metrics. The model's answers are saved during the
evaluation, so an interrupted call can be resumed. docs/eval.md defines the metrics.
"""
