"""Lists the sub-packages below each folder that pyproject.toml maps into `cannopy`; all other metadata is there."""

import os

from setuptools import find_packages, setup

ROOTS = {
    "cannopy": "cannopy",
    "cannopy.frontend": "frontend",
    "cannopy.fx_passes": "fx_passes",
    "cannopy.fusion_rules": "fusion_rules",
    "cannopy.stream_scheduler": "stream_scheduler",
    "cannopy.superkernel": "superkernel",
    "cannopy.models": "models",
    "cannopy.backend": "backend",
}

packages = []
for name, folder in ROOTS.items():
    if os.path.isfile(os.path.join(folder, "__init__.py")):
        packages += [name, *(f"{name}.{child}" for child in find_packages(folder))]

setup(packages=packages)
