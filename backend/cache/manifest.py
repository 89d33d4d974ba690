"""An artifact as files: ``module.py`` (the source), ``manifest.json`` (all the rest), ``constants.pt``, ``torchair/``.

The manifest has the SHA-256 of every other file and of itself, so a truncated or edited entry is known before any of
it is executed.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from cannopy.backend.artifact import Artifact, CallForm, Fingerprint
from cannopy.backend.cache.text import place
from cannopy.backend.emit import Attribute, EmittedModule
from cannopy.fx_passes.program import Held, InputSpec, OutputSpec, WeightEntry

FORMAT = 3
MANIFEST, SOURCE, CONSTANTS, LOG, TORCHAIR = "manifest.json", "module.py", "constants.pt", "build.log", "torchair"

Reader = Callable[[str], bytes]


class CorruptError(ValueError):
    """An entry is not what its manifest says, or has no readable manifest."""


class NotCacheableError(ValueError):
    """The artifact holds a value that cannot be written down."""


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()


def encode(value: Any, where: str) -> Any:
    """`value` as JSON: scalars, tuples, lists, dicts with string keys, dtypes and devices. `NotCacheableError`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode(v, where) for v in value]
    if isinstance(value, torch.Size):
        return {"size": list(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(v, where) for v in value]}
    if isinstance(value, dict) and all(isinstance(k, str) for k in value):
        return {"dict": {k: encode(v, where) for k, v in value.items()}}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    raise NotCacheableError(f"{where}: a {type(value).__name__} cannot be stored, so the compilation is not cached")


def decode(value: Any) -> Any:
    """Inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    (kind, inner), *_ = value.items()
    if kind == "tuple":
        return tuple(decode(v) for v in inner)
    if kind == "dict":
        return {k: decode(v) for k, v in inner.items()}
    if kind == "size":
        return torch.Size(inner)
    return dtype(inner) if kind == "dtype" else torch.device(inner)


def dtype(name: str) -> torch.dtype:
    """The dtype called `name` in torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CorruptError(f"no dtype {name}")
    return found


def own_files(artifact: Artifact, log: list[str]) -> dict[str, bytes]:
    """The files of `artifact` except the manifest and torchair's."""
    files = {SOURCE: artifact.module.source.encode(), LOG: "\n".join(log).encode()}
    if artifact.tensors:
        buffer = io.BytesIO()
        torch.save(dict(artifact.tensors), buffer)
        files[CONSTANTS] = buffer.getvalue()
    return files


def dump(artifact: Artifact, files: Mapping[str, bytes]) -> bytes:
    """``manifest.json`` for an entry made of `files`. `NotCacheableError`."""
    module = {k: v for k, v in asdict(artifact.module).items() if k != "source"}
    body: dict[str, Any] = {
        "format": FORMAT,
        "fingerprint": asdict(artifact.fingerprint),
        "model_class": artifact.model_class,
        "method": artifact.method,
        "form": asdict(artifact.form),
        "module": module,
        "inputs": [asdict(s) | {"dtype": str(s.dtype).removeprefix("torch.")} for s in artifact.inputs],
        "devices": {name: place(device) for name, device in artifact.devices.items()},
        "output": {
            "treespec": artifact.output.treespec,
            "leaves": [[kind, encode(v, f"output leaf {i}")] for i, (kind, v) in enumerate(artifact.output.leaves)],
        },
        "weights": [asdict(w) for w in artifact.weights],
        "constants": {path: encode(v, path) for path, v in artifact.constants.items()},
        "report": dict(artifact.report),
        "files": {name: {"sha256": sha256(data), "bytes": len(data)} for name, data in files.items()},
    }
    body["sha256"] = _self_digest(body)
    return json.dumps(body, indent=1, ensure_ascii=False).encode()


def parse(data: bytes) -> dict[str, Any]:
    """The manifest as JSON, checked against its own digest. `CorruptError`."""
    try:
        body = json.loads(data)
        stated = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as e:
        raise CorruptError(f"{MANIFEST} is not readable ({e})") from e
    if stated != _self_digest(body):
        raise CorruptError(f"{MANIFEST} was changed after it was written")
    if body.get("format") != FORMAT:
        raise CorruptError(f"{MANIFEST} has format {body.get('format')}, this version reads {FORMAT}")
    return dict(body)


def fingerprint(body: Mapping[str, Any]) -> Fingerprint:
    """The key that the entry was stored under. `CorruptError`."""
    try:
        found = Fingerprint(**body["fingerprint"])
    except (KeyError, TypeError) as e:
        raise CorruptError(f"{MANIFEST} has no key of this cache ({e})") from e
    if not isinstance(found.key, str) or not isinstance(found.fields, dict) or not isinstance(found.details, dict):
        raise CorruptError(f"{MANIFEST} has no key of this cache")
    return found


def checked(body: Mapping[str, Any], name: str, data: bytes) -> bytes:
    """`data` if it is the file `name` of the manifest; else `CorruptError`."""
    expected = body["files"][name]
    if len(data) != expected["bytes"]:
        raise CorruptError(f"{name} has {len(data)} bytes, the manifest says {expected['bytes']}")
    if sha256(data) != expected["sha256"]:
        raise CorruptError(f"{name} was changed after it was written")
    return data


def artifact(body: Mapping[str, Any], read: Reader) -> Artifact:
    """The artifact of a parsed manifest; ``read(name)`` gives the verified bytes of a file.

    In its ``devices`` the place where the graph runs is called `text.DEVICE`.
    """
    module = dict(body["module"])
    module["attributes"] = tuple(Attribute(**a) for a in module["attributes"])
    module["arguments"], module["written"] = tuple(module["arguments"]), tuple(module["written"])
    tensors = {}
    if CONSTANTS in body["files"]:
        tensors = torch.load(io.BytesIO(read(CONSTANTS)), weights_only=True)
    return Artifact(
        fingerprint=fingerprint(body),
        model_class=body["model_class"],
        method=body["method"],
        form=_form(body["form"]),
        module=EmittedModule(source=read(SOURCE).decode(), **module),
        inputs=tuple(_input(s) for s in body["inputs"]),
        devices=body["devices"],
        output=OutputSpec(body["output"]["treespec"], tuple((kind, decode(v)) for kind, v in body["output"]["leaves"])),
        weights=tuple(WeightEntry(**{**w, "sources": tuple(w["sources"])}) for w in body["weights"]),
        constants={path: decode(v) for path, v in body["constants"].items()},
        tensors=tensors,
        report=body["report"],
    )


def _form(raw: Mapping[str, Any]) -> CallForm:
    return CallForm(raw["positional"], tuple(raw["keywords"]), tuple((path, kind) for path, kind in raw["leaves"]))


def _input(raw: Mapping[str, Any]) -> InputSpec:
    values = dict(raw)
    values["dtype"] = dtype(values["dtype"])
    for k in ("shape", "stride", "view"):
        values[k] = None if values[k] is None else tuple(values[k])
    values["held"] = None if values["held"] is None else Held(**values["held"])
    return InputSpec(**values)


def _self_digest(body: Mapping[str, Any]) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode())
