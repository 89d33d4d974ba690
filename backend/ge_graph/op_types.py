"""What GE op types are, as far as counting and planning need it."""

from __future__ import annotations

METADATA = frozenset(
    {
        "Bitcast",
        "ExpandDims",
        "FlattenV2",
        "Identity",
        "NoOp",
        "Rank",
        "Reshape",
        "Shape",
        "Size",
        "Squeeze",
        "Unsqueeze",
    }
)
"""Ops that rename memory; GE launches nothing for them."""

GRAPH_INPUTS = frozenset({"Data", "RefData"})

NOT_KERNELS = METADATA | GRAPH_INPUTS | {"Const", "Constant", "ConstPlaceHolder", "NetOutput", "Cmo"}

COPIES = frozenset(
    {
        "Assign",
        "ConcatD",
        "ConcatV2",
        "ConcatV2D",
        "ScatterElements",
        "SelectV2",
        "TensorMove",
        "TensorScatterUpdate",
    }
)
"""Ops that write all of their result although most of it is an unchanged input."""

SAME_DTYPE = METADATA - {"Bitcast", "Rank", "Shape", "Size"} | {
    "Add",
    "Div",
    "FloorDiv",
    "FloorMod",
    "Maximum",
    "Minimum",
    "Mul",
    "Muls",
    "Neg",
    "Pow",
    "RealDiv",
    "Sub",
    "TensorMove",
    "Transpose",
}
"""Ops whose result has the dtype of their first input; torchair declares none for those inside a converter."""

REF_OUTPUTS: dict[str, dict[int, int]] = {
    "Assign": {0: 0},
    "InplaceIndexAdd": {0: 0},
    "InplaceUpdate": {0: 0},
    "MlaPrologV3": {2: 9, 3: 10},
    "Scatter": {0: 0},
    "ScatterNdUpdate": {0: 0},
}
"""Type -> output -> input whose memory it is: these ops write in place. Those of the MLA prolog are
kv_cache and kr_cache (torchair's graph_pass._get_output_to_input_ref_idx)."""
