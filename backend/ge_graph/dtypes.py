"""GE's two numberings of dtypes: ``ge::DataType`` (attributes) and the protobuf's (descriptors)."""

from __future__ import annotations

import torch

BY_NAME: dict[str, torch.dtype] = {
    "DT_FLOAT": torch.float32,
    "DT_FLOAT16": torch.float16,
    "DT_BF16": torch.bfloat16,
    "DT_DOUBLE": torch.float64,
    "DT_INT8": torch.int8,
    "DT_UINT8": torch.uint8,
    "DT_INT16": torch.int16,
    "DT_UINT16": torch.uint16,
    "DT_INT32": torch.int32,
    "DT_UINT32": torch.uint32,
    "DT_INT64": torch.int64,
    "DT_UINT64": torch.uint64,
    "DT_BOOL": torch.bool,
    "DT_COMPLEX64": torch.complex64,
    "DT_COMPLEX128": torch.complex128,
    "DT_FLOAT8_E5M2": torch.float8_e5m2,
    "DT_FLOAT8_E4M3FN": torch.float8_e4m3fn,
}

# ge::DataType, metadef/inc/external/graph/types.h
_GE_NUMBERS: dict[int, str] = {
    0: "DT_FLOAT",
    1: "DT_FLOAT16",
    2: "DT_INT8",
    3: "DT_INT32",
    4: "DT_UINT8",
    6: "DT_INT16",
    7: "DT_UINT16",
    8: "DT_UINT32",
    9: "DT_INT64",
    10: "DT_UINT64",
    11: "DT_DOUBLE",
    12: "DT_BOOL",
    16: "DT_COMPLEX64",
    17: "DT_COMPLEX128",
    27: "DT_BF16",
    35: "DT_FLOAT8_E5M2",
    36: "DT_FLOAT8_E4M3FN",
}

BY_GE_NUMBER: dict[int, torch.dtype] = {number: BY_NAME[name] for number, name in _GE_NUMBERS.items()}
