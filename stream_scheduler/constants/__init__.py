"""Fitted constants of the cost model, as YAML written by ``benchmarks/calibrate.py``."""

from .model import Constant, Constants, UnknownConstantError, load_constants

__all__ = ["Constant", "Constants", "UnknownConstantError", "load_constants"]
