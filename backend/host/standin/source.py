"""C source of the stand-in library.

Every function returns 0, which in CANN's API is success for a status and null for a handle. The
few in BODIES differ: they fill an out-parameter, return a text, or refuse because there is no
device. Signatures follow CANN's public headers (acl_rt.h, acl_op_compiler.h, securec.h).

The text is plain C11 without headers, and links without the C library, so that a bare compiler
is enough; there is nothing in it that depends on the processor.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

COMPILER_FLAGS = (
    *("-shared", "-fPIC", "-O1", "-w", "-s"),
    *("-ffreestanding", "-fno-stack-protector", "-nostdlib"),
)

SOC_NAME = "Ascend910_9391"
"""What aclrtGetSocName answers (one die of Atlas A3). It must not be null: callers build a string of it."""

INVALID_DEVICE = 107001
"""ACL_ERROR_RT_INVALID_DEVICEID, the runtime's answer to a device number that does not exist."""

_PRELUDE = """\
typedef unsigned long size_t;
typedef __builtin_va_list va_list;
int vsnprintf(char *, size_t, const char *, va_list);
void *memcpy(void *, const void *, size_t);
void *memset(void *, int, size_t);
size_t strlen(const char *);
"""

_NEED_A_DEVICE = """
    aclrtSetDevice aclrtGetDevice aclrtCreateContext aclrtGetCurrentContext aclrtDeviceGetBareTgid
    aclrtCreateStream aclrtCreateStreamWithConfig aclrtCreateEventWithFlag aclrtCreateEventExWithFlag
    aclrtMalloc aclrtMallocAlign32 aclrtMallocPhysical aclrtMallocHost aclrtMallocHostWithCfg
    aclrtReserveMemAddress
"""

BODIES: dict[str, str] = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { if (count) *count = 0; return 0; }",
    "aclrtGetSocName": f'const char *aclrtGetSocName(void) {{ return "{SOC_NAME}"; }}',
    "aclGetRecentErrMsg": (
        "const char *aclGetRecentErrMsg(void)"
        ' { return "this is the CANN stand-in of cannopy: there is no NPU on this host"; }'
    ),
    # Default of every compile option; torch_npu insists on a size above 0.
    "aclGetCompileoptSize": "size_t aclGetCompileoptSize(int option) { return 8; }",
    "aclGetCompileopt": (
        "int aclGetCompileopt(int option, char *value, size_t length)"
        ' { if (length < 8) return 1; memcpy(value, "disable", 8); return 0; }'
    ),
    "aclrtGetMemInfo": (
        "int aclrtGetMemInfo(int kind, size_t *available, size_t *total) { *available = 0; *total = 0; return 0; }"
    ),
    # Success without a result would hand out garbage as a handle or an address.
    **{name: f"int {name}() {{ return {INVALID_DEVICE}; }}" for name in _NEED_A_DEVICE.split()},
    # securec: CANN re-exports Huawei's bounds-checked string functions.
    "vsnprintf_s": (
        "int vsnprintf_s(char *to, size_t size, size_t count, const char *format, va_list arguments)"
        " { int n = vsnprintf(to, count < size ? count + 1 : size, format, arguments);"
        " return n < 0 || (size_t)n >= size || (size_t)n > count ? -1 : n; }"
    ),
    "snprintf_s": (
        "int snprintf_s(char *to, size_t size, size_t count, const char *format, ...)"
        " { va_list arguments; __builtin_va_start(arguments, format);"
        " int n = vsnprintf(to, count < size ? count + 1 : size, format, arguments);"
        " __builtin_va_end(arguments);"
        " return n < 0 || (size_t)n >= size || (size_t)n > count ? -1 : n; }"
    ),
    "strcpy_s": (
        "int strcpy_s(char *to, size_t size, const char *from)"
        " { size_t n = strlen(from) + 1; if (n > size) return 34; memcpy(to, from, n); return 0; }"
    ),
    "memcpy_s": (
        "int memcpy_s(void *to, size_t size, const void *from, size_t count)"
        " { if (count > size) return 34; memcpy(to, from, count); return 0; }"
    ),
    "memset_s": (
        "int memset_s(void *to, size_t size, int value, size_t count)"
        " { if (count > size) return 34; memset(to, value, count); return 0; }"
    ),
}

_SYMBOL = re.compile(r"[A-Za-z0-9_.$]+")
_DATA = re.compile(r"_Z(TV|TI|TS|TT|GV)")  # Itanium C++ ABI: vtables, type information, guards


def c_source(symbols: Iterable[str]) -> str:
    """C that defines each of `symbols`; those named like C++ data objects as 512 zero bytes.

    Raises ValueError for a name no assembler would take.
    """
    lines = [_PRELUDE]
    for index, name in enumerate(sorted(symbols)):
        if not _SYMBOL.fullmatch(name):
            raise ValueError(f"not a linker symbol: {name!r}")
        if name in BODIES:
            lines.append(BODIES[name])
        elif _DATA.match(name):
            lines.append(f'void *d{index}[64] __asm__("{name}"); void *d{index}[64] = {{0}};')
        else:
            # The label carries mangled C++ names, which are no C identifiers one may declare freely.
            lines.append(f'long f{index}(void) __asm__("{name}"); long f{index}(void) {{ return 0; }}')
    return "\n".join(lines) + "\n"


def generator_version() -> str:
    """Changes exactly when the same symbols would yield another library."""
    sample = c_source([*BODIES, "_ZTVsample", "sample"]) + " ".join(COMPILER_FLAGS)
    return hashlib.sha256(sample.encode()).hexdigest()[:12]
