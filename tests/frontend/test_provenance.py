"""Module paths as Dynamo of any version writes them."""

from __future__ import annotations

import pytest

from cannopy.frontend.provenance import layer_index, module_path


@pytest.mark.parametrize(
    ("text", "path", "layer"),
    [
        ("L['self'].model.layers.3.mlp", "model.layers.3.mlp", 3),
        ("L['self']._modules['model']._modules['layers']._modules['3']", "model.layers.3", 3),
        ("L['self'].layers[3].norm", "layers.3.norm", 3),
        ("L['args'][0]._modules['model']._modules['layers']._modules['3'].mlp", "model.layers.3.mlp", 3),
        ("L['args'][0]", "", None),
        ("L['self']", "", None),
    ],
)
def test_module_path(text: str, path: str, layer: int | None) -> None:
    assert module_path({"key": (text, object)}) == path
    assert layer_index(path) == layer
