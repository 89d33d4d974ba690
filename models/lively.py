"""Random weights that leave no operation without effect.

The usual initialisation (normal, std 0.02, gammas 1, biases 0) hides errors: residual branches hardly matter, a missed
gamma or a dropped router correction changes nothing. Here activations are of order 1 and no parameter is neutral:

=====================================  ===========================================================
matrices ``[…, out, in]``              normal, std 1/√in
embeddings                             normal, std 1
gammas of norms                        uniform in [0.5, 1.7], so neither 1 nor symmetric about it
biases                                 normal, std 0.1
router correction (``e_score_…bias``)  normal, std 0.2: sigmoid scores spread as much, so it decides
other vectors and scalars              normal, std 0.1
=====================================  ===========================================================

Each parameter has its own generator, seeded by its name: adding a layer does not change the others.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import nn

_CORRECTION = "e_score_correction_bias"


def lively_(model: nn.Module, seed: int) -> nn.Module:
    """Overwrites all parameters of ``model`` and its router corrections in place; returns ``model``.

    Other buffers (rotary frequencies, caches) keep their values.
    """
    with torch.no_grad():
        for prefix, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                _fill(parameter, module, name, _generator(f"{prefix}.{name}", seed))
            for name, buffer in module.named_buffers(recurse=False):
                if name == _CORRECTION:
                    buffer.copy_(0.2 * torch.randn(buffer.shape, generator=_generator(f"{prefix}.{name}", seed)))
    return model


def _generator(name: str, seed: int) -> torch.Generator:
    # The CPU generator uses the low 32 bits of its seed only.
    return torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))


def _fill(parameter: torch.Tensor, module: nn.Module, name: str, generator: torch.Generator) -> None:
    values = torch.empty(parameter.shape)
    if isinstance(module, nn.Embedding):
        values.normal_(0.0, 1.0, generator=generator)
    elif parameter.dim() >= 2:
        values.normal_(0.0, 1.0 / math.sqrt(parameter.shape[-1]), generator=generator)
    elif name == "weight" and "norm" in type(module).__name__.lower():
        values.uniform_(0.5, 1.7, generator=generator)
    elif name == _CORRECTION:
        values.normal_(0.0, 0.2, generator=generator)
    else:
        values.normal_(0.0, 0.1, generator=generator)
    parameter.copy_(values)
