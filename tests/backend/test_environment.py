"""A variable of the environment that a model's code reads is part of the key, wherever its name comes from."""

from __future__ import annotations

import pytest
import torch

from tests.backend.test_cache_key import identity, key, make_module

SOURCE = """
import os, torch, functools
from os import getenv
ENV, GET = os.environ, os.getenv
NAME, NAMES, PREFIX = "USER_SCALE", {"scale": ["USER_SCALE"]}, "USER_"
def flag(name, default="0"): return os.environ.get(name, default)
class Model(torch.nn.Module):
    own = "USER_SCALE"
    def __init__(self):
        super().__init__()
        self.name = "USER_SCALE"
        self.table = {"names": ("USER_SCALE",)}
    def forward(self, x, name="USER_SCALE"):
        return x * int(VALUE or 0)
"""
READS = {
    "environ": 'os.environ.get("USER_SCALE")',
    "getenv": 'getenv("USER_SCALE")',
    "subscript": 'os.environ["USER_SCALE"]',
    "membership": '"USER_SCALE" in os.environ',
    "bytes": 'os.environb.get(b"USER_SCALE")',
    "alias of the environment": 'ENV.get("USER_SCALE")',
    "alias of the function": 'GET("USER_SCALE")',
    "helper": 'flag("USER_SCALE")',
    "helper, by keyword": 'flag(name="USER_SCALE", default="")',
    "name of the module": "os.environ.get(NAME)",
    "table of the module": 'max(os.environ.get(n, "") for n in NAMES["scale"])',
    "put together": 'os.environ.get(f"{PREFIX}SCALE")',
    "put together here": 'os.environ.get("USER_" + "SCALE".upper())',
    "name of the class": "os.environ.get(self.own)",
    "name of the object": "os.environ.get(self.name)",
    "table of the object": 'os.environ.get(self.table["names"][0])',
    "default": "os.environ.get(name)",
    "lambda": '(lambda: os.environ.get("USER_SCALE"))()',
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_variable_that_is_read_counts(read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = make_module(SOURCE.replace("VALUE", read)).Model(), (torch.zeros(1),)
    found = []
    for value in (None, "1", "2"):
        if value is not None:
            monkeypatch.setenv("USER_SCALE", value)
        monkeypatch.setenv("HOME", f"/home/{value}")
        monkeypatch.setenv("TERM", f"term {value}")
        found.append(identity(model, call))
    assert len({f.key for f in found}) == 3
    assert key.differences(found[1], found[2]) == ["code (environment USER_SCALE: '1' -> '2')"]


def test_code_that_reads_none_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, call = make_module(SOURCE.replace("VALUE", "len(self.name)")).Model(), (torch.zeros(1),)
    before = identity(model, call)
    monkeypatch.setenv("USER_SCALE", "1")
    assert identity(model, call).key == before.key
