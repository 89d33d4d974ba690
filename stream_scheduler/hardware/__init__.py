"""Descriptions of Ascend chips, one YAML file per product family, each figure with its source."""

from .loader import UnknownHardware, hardware_names, load_hardware
from .model import Figure, Hardware, Link

__all__ = ["Figure", "Hardware", "Link", "UnknownHardware", "hardware_names", "load_hardware"]
