"""Analytic description of a model's step: which kernels, how large, on which die."""
