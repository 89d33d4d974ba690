"""What the dynamic section of one shared object says, read with pyelftools.

Works on any ELF class and byte order, so x86-64 and arm64 alike, whatever machine reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerSymSection
from elftools.elf.hash import ELFHashSection, GNUHashSection
from elftools.elf.sections import SymbolTableSection

_FIRST_REAL_VERSION = 2  # indices 0 and 1 of .gnu.version are "local" and "global", that is unversioned


@dataclass(frozen=True)
class Dynamic:
    """The loader's view of a library: its name, what it needs, and where that is looked for."""

    soname: str | None
    needed: tuple[str, ...]
    search: tuple[str, ...]


class SharedObject:
    """One open ELF file. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb")
        try:
            self._elf = ELFFile(self._file)
        except BaseException:  # whatever ends it, the file must not stay open
            self._file.close()
            raise

    def __enter__(self) -> SharedObject:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def dynamic(self) -> Dynamic:
        """SONAME, NEEDED, and the RPATH or RUNPATH entries with `$ORIGIN` replaced by the file's folder."""
        soname: str | None = None
        needed: list[str] = []
        search: list[str] = []
        section = self._elf.get_section_by_name(".dynamic")
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                # pyelftools sets one attribute per kind of tag, which no type checker sees.
                kind = tag.entry.d_tag.removeprefix("DT_").lower()
                value = str(getattr(tag, kind, ""))
                if kind == "soname":
                    soname = value
                elif kind == "needed":
                    needed.append(value)
                elif kind in ("rpath", "runpath"):
                    search += value.split(":")
        origin = str(self.path.resolve().parent)
        expanded = (p.replace("$ORIGIN", origin).replace("${ORIGIN}", origin) for p in search if p)
        return Dynamic(soname, tuple(needed), tuple(expanded))

    def unversioned_imports(self) -> set[str]:
        """Strong undefined symbols that carry no version.

        A versioned one names the system library that has it (glibc, libstdc++, libgcc all version
        theirs), a weak one may stay undefined; neither can be CANN's.
        """
        table = self._elf.get_section_by_name(".dynsym")
        if not isinstance(table, SymbolTableSection):
            return set()
        versions = self._elf.get_section_by_name(".gnu.version")
        found: set[str] = set()
        for index, symbol in enumerate(table.iter_symbols()):
            if symbol.entry.st_shndx != "SHN_UNDEF" or symbol.entry.st_info.bind != "STB_GLOBAL":
                continue
            if isinstance(versions, GNUVerSymSection):
                version = versions.get_symbol(index).entry.ndx
                if isinstance(version, int) and version >= _FIRST_REAL_VERSION:
                    continue
            found.add(symbol.name)
        found.discard("")
        return found

    def defines(self, names: set[str]) -> set[str]:
        """Those of `names` which this object exports; by hash table where it has one.

        libtorch_cpu has 75,000 symbols: reading them all takes 3 s, looking 2,000 up takes 0.1 s.
        """
        for section in self._elf.iter_sections():
            if isinstance(section, (GNUHashSection, ELFHashSection)):
                hits = ((name, section.get_symbol(name)) for name in names)
                return {name for name, symbol in hits if symbol and symbol.entry.st_shndx != "SHN_UNDEF"}
        table = self._elf.get_section_by_name(".dynsym")
        if not isinstance(table, SymbolTableSection):
            return set()
        return {s.name for s in table.iter_symbols() if s.entry.st_shndx != "SHN_UNDEF"} & names

    def strings(self, pattern: re.Pattern[bytes]) -> set[str]:
        """NUL-terminated strings of the read-only data that match `pattern` from end to end."""
        found: set[str] = set()
        for name in (".rodata", ".rodata.str1.1", ".rodata.str1.8"):
            section = self._elf.get_section_by_name(name)
            if section is not None:
                data = section.data()
                found.update(t.decode() for t in data.split(b"\0") if t and pattern.fullmatch(t))
        return found
