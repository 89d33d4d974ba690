"""A file of a user's with everything that a trace can read, and the identity of compiling the model in it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import cannopy.backend.cache.key  # noqa: F401
from cannopy.backend.artifact import Fingerprint
from tests.backend.programs import eager

SOURCE = '''
import enum
import functools
import os
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

LIMIT = 1.5
WIDE = torch.float32
TABLE = {"up": 2, "down": [3, 4]}
CALLS = {"gate": lambda x: x + 1}
ACT = F.silu
HERE = Path(__file__).resolve().parent
CACHE = os.path.expanduser("~/.cache/model")
SETTINGS = types.SimpleNamespace(top_k=2, nested=types.SimpleNamespace(depth=1))


class Kind(enum.Enum):
    ONE = 1
    TWO = 2


@dataclass
class Config:
    model_type: str = "user"
    top_k: int = 2
    rope: dict = field(default_factory=lambda: {"theta": 10000.0})
    kind: Kind = Kind.ONE
    folder: str = str(HERE / "config")


def decorate(times):
    def wrap(f):
        @functools.wraps(f)
        def inner(*args):
            return f(*args) * times
        return inner
    return wrap


@decorate(2)
def helper(x, bias=1.0, *, gain=1.0):
    """What it adds."""
    return x * LIMIT + bias * gain


def gate(scale):
    def apply(x):
        return helper(x) * scale
    return apply


GATE = gate(3.0)
CLIP = functools.partial(torch.clamp, max=6.0)


def attend_short(x):
    return x


class Norm:
    eps = 1e-6

    def __call__(self, x):
        return x + self.eps


class Block(nn.Module):
    """One layer."""

    width = 4
    norm = Norm()

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.proj = nn.Linear(8, 8, bias=False)
        self.act = functools.partial(F.gelu, approximate="tanh")
        self.pre = lambda x: x * 2
        self.options = {"window": 3, "names": ("a", "b")}

    @property
    def scale(self):
        return 0.5

    @staticmethod
    def rotate(x):
        return -x

    def forward(self, x, mask=None):
        x = CALLS["gate"](CLIP(ACT(GATE(self.act(self.pre(self.inner(x)))))))
        if int(os.environ.get("USER_FAST", "0")):
            x = x + 1
        # a comment
        return x.to(WIDE) * TABLE["up"] * self.width * self.scale * SETTINGS.nested.depth

    def inner(self, x):
        return self.norm(self.rotate(self.proj(x))) + globals()["attend_" + "short"](x)


class Model(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(Block(self.config) for _ in range(layers))
        self.register_buffer("table", torch.zeros(4))
        self.path = HERE / "weights"
        self.eval()

    def forward(self, x, mask=None, flag=False):
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def prefill(self, x):
        return self(x)
'''


def load(folder: Path, source: str = SOURCE, file: str = "user_model.py") -> ModuleType:
    """The module of ``source``, saved in ``folder`` and imported under the same name each time."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("user_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_model"] = module
    spec.loader.exec_module(module)
    return module


def identity(
    model: torch.nn.Module, args: Any = None, kwargs: Any = None, options: Any = None, method: str = "forward"
) -> Fingerprint:
    """The key of ``model.forward(x)``."""
    key = sys.modules["cannopy.backend.cache.key"]
    made: Fingerprint = key.fingerprint(
        model, method, (torch.zeros(2, 8),) if args is None else args, kwargs or {}, options or eager()
    )
    return made


if __name__ == "__main__":  # the key as another process sees it
    sys.modules["cannopy.backend.cache.key"].package_digest = lambda: "pinned"  # type: ignore[attr-defined]
    print(identity(load(Path(sys.argv[1])).Model()).key)
