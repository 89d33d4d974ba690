"""Descriptions of Ascend chips, one YAML file per product family, each figure with its source."""

from .loader import UnknownHardwareError, hardware_names, load_hardware
from .model import Figure, Hardware, Link

__all__ = ["Figure", "Hardware", "Link", "UnknownHardwareError", "hardware_names", "load_hardware"]
