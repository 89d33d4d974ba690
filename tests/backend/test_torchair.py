"""The generated method through the real ``cache_compile``, run by the host engine."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from cannopy.backend import torchair
from cannopy.backend.build import build
from cannopy.backend.cache import list_entries, manifest, verify
from cannopy.backend.emit import EmittedModule
from cannopy.backend.guards import GuardError
from cannopy.backend.host import target
from cannopy.backend.options import COMPILER_OPTIONS, BuildOptions
from tests.backend.processes import run
from tests.backend.programs import (
    Cache,
    Tiny,
    aten,
    check_same_as_eager,
    compile_tiny,
    example,
    look,
    make_output,
    tiny,
    tiny_program,
)
from tests.backend.test_cache_store import snapshot


def options(cache_dir: Path | None = None, **changes) -> BuildOptions:
    return BuildOptions(cache_dir=cache_dir, use_cache=cache_dir is not None, **changes)


def test_cold_build(capsys) -> None:
    model = tiny()
    before = example()[1].keys
    compiled, x, cache = compile_tiny(model, options())
    assert torch.equal(cache.keys, before)
    assert int(model.count) == 0
    for step in range(3):
        check_same_as_eager(compiled, model, x + step, cache)
    ops = compiled.report["ge_ops"]
    assert ops["MatMul"] == 1
    assert ops["Add"] == 2
    assert ops["Data"] == 5
    assert capsys.readouterr().out == ""
    with pytest.raises(GuardError, match="float64"):
        compiled(x.double(), cache)


def test_the_first_run_of_a_loaded_graph_sees_the_target(tmp_path, monkeypatch) -> None:
    """torchair asks for the chip once more when a stored graph runs for the first time."""
    converter = importlib.import_module("torchair._ge_concrete_graph.fx2ge_converter")
    original = converter._update_internal_format_from_inputs
    seen = []
    monkeypatch.setattr(
        converter,
        "_update_internal_format_from_inputs",
        lambda *args: seen.append(target.current().name) or original(*args),
    )
    for _ in range(2):
        model = tiny()
        compiled, x, cache = compile_tiny(model, options(tmp_path, target="atlas-a2"))
        for _i in range(2):
            check_same_as_eager(compiled, model, x, cache)
    assert compiled.report["cache"]["status"] == "hit"
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}, assign=True)
    check_same_as_eager(compiled, model, x, cache)
    assert seen == ["atlas-a2"] * 3


def test_dynamo_has_no_part_in_the_calls() -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, options())
    torch._dynamo.reset()
    seen = counters["stats"]["unique_graphs"]
    check_same_as_eager(compiled, model, x, cache)
    assert counters["stats"]["unique_graphs"] == seen


@pytest.mark.parametrize("change", ["assign", "copy", "data"])
def test_changed_weights(change: str) -> None:
    model = tiny()
    compiled, x, cache = compile_tiny(model, options())
    check_same_as_eager(compiled, model, x, cache)
    if change == "data":
        model.proj.weight.data = torch.randn(8, 16)
    else:
        model.load_state_dict({k: v * 3 + 1 for k, v in model.state_dict().items()}, assign=change == "assign")
    check_same_as_eager(compiled, model, x, cache)


def test_the_same_program_twice_in_one_process(tmp_path) -> None:
    for folder in ("a", "b"):
        model = tiny()
        compiled, x, cache = compile_tiny(model, options(tmp_path / folder))
        assert compiled.report["cache"]["status"] == "miss"
        check_same_as_eager(compiled, model, x, cache)
        assert stored(tmp_path / folder).stat().st_size > 0


@pytest.mark.slow
def test_a_second_process_loads_without_dynamo(tmp_path) -> None:
    cold = run(tmp_path)
    warm = run(tmp_path)
    assert (cold["status"], warm["status"]) == ("miss", "hit")
    assert cold["graphs"] == 1
    assert warm["graphs"] == 0
    assert cold["key"] == warm["key"]


def test_odd_paths(tmp_path, monkeypatch) -> None:
    odd = tmp_path / "a 'b' \"c\" {d} 中文 \\e"
    odd.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(odd))
    for status in ("miss", "hit"):
        model = tiny()
        compiled, x, cache = compile_tiny(model, options(odd / "cache"))
        assert compiled.report["cache"]["status"] == status
        check_same_as_eager(compiled, model, x, cache)


def stored(root: Path) -> Path:
    (path,) = [p for e in list_entries(root) for p in e.path.rglob("compiled_module")]
    return path


def test_a_damaged_torchair_file_is_rebuilt(tmp_path) -> None:
    compile_tiny(tiny(), options(tmp_path))
    path = stored(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    model = tiny()
    compiled, x, cache = compile_tiny(model, options(tmp_path))
    assert compiled.report["cache"]["status"] == "rebuilt"
    assert "compiled_module has 100 bytes" in compiled.report["cache"]["reason"]
    check_same_as_eager(compiled, model, x, cache)
    assert [e.problem for e in verify(tmp_path)] == [None]


def test_a_file_that_torchair_refuses_is_rebuilt(tmp_path) -> None:
    compile_tiny(tiny(), options(tmp_path))
    path = stored(tmp_path)
    path.write_bytes(b"no pickle")
    entry = list_entries(tmp_path)[0].path
    body = json.loads((entry / "manifest.json").read_text())
    body.pop("sha256")
    name = str(path.relative_to(entry))
    body["files"][name] = {"sha256": manifest.sha256(b"no pickle"), "bytes": len(b"no pickle")}
    body["sha256"] = manifest._self_digest(body)
    (entry / "manifest.json").write_text(json.dumps(body))
    assert [e.problem for e in verify(tmp_path)] == [None]
    model = tiny()
    compiled, x, cache = compile_tiny(model, options(tmp_path))
    assert compiled.report["cache"]["status"] == "rebuilt"
    assert "Clear broken cache" in compiled.report["cache"]["reason"]
    assert any(p.name.startswith(".aside-") and list(p.rglob("compiled_module")) for p in tmp_path.iterdir())
    check_same_as_eager(compiled, model, x, cache)


def unlowerable(model: Tiny):
    """A scope is open when the converter of an op that torchair has none for is looked up."""
    x, cache = example()
    program = tiny_program(model, x, cache)
    graph = program.gm.graph
    mm = next(iter(graph.find_nodes(op="call_function", target=aten.mm.default)))
    (keys,) = (n for n in graph.nodes if n.name == "keys")
    importlib.import_module("torch_npu.dynamo.torchair").CompilerConfig  # noqa: B018 registers torch.ops.air
    with graph.inserting_before(mm):
        graph.call_function(torch.ops.air.scope_enter.default, (["_user_stream_label"], ["leak"]))
        rows = graph.call_function(aten.arange.default, (4,))
        kept = graph.call_function(aten.index_copy.default, (keys, 0, rows, keys))
        graph.call_function(torch.ops.air.scope_exit.default, ())
    for n in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        if n.args[0] is keys:
            n.args = (kept, n.args[1])
    return program


def test_a_failed_compilation_leaves_nothing_behind(tmp_path) -> None:
    model = tiny()
    compile_tiny(model, options(tmp_path))
    before = snapshot(tmp_path)
    model.factor = 2.5
    with pytest.raises(torchair.CompileError, match="index_copy"):
        compile_tiny(model, options(tmp_path), unlowerable(model))
    assert snapshot(tmp_path) == before
    model.factor = 2.0
    compiled, _, _ = compile_tiny(model, options(text="another=build"))
    labels = [op.name for op in compiled.executor().ge_graph.op if "_user_stream_label" in op.attr]
    assert labels == []


def test_a_model_and_a_call_in_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny()
        compiled, x, cache = compile_tiny(model, options())
        check_same_as_eager(compiled, model, x, cache)
    model = tiny()
    compiled, x, cache = compile_tiny(model, options())
    with torch.inference_mode():
        check_same_as_eager(compiled, model, x, cache)
    check_same_as_eager(compiled, model, x, cache)


def test_weights_that_are_not_there(tmp_path) -> None:
    model = tiny().to("meta")
    x, cache = example()
    call = (x.to("meta"), Cache(cache.keys.to("meta")))
    for status in ("miss", "hit"):
        found = look(model, call, options(tmp_path))
        assert found.status == status
        compiled = found.compiled
        if compiled is None:
            program = tiny_program(model, *call)
            compiled = build(program, model, "forward", call, {}, options(tmp_path), found, {}, make_output)
        assert compiled.report["ge_ops"]["MatMul"] == 1
    model = tiny()
    found = look(model, example(), options(tmp_path))
    assert found.status == "hit"
    check_same_as_eager(found.compiled, model, *example())


def test_options_are_set_and_checked() -> None:
    config = torchair.compiler_config(COMPILER_OPTIONS)
    assert config.experimental_config.frozen_parameter.value == "1"
    assert config.experimental_config.pattern_fusion_pass.value == "0"
    assert config.experimental_config.topology_sorting_strategy.value == "StableRDFS"
    with pytest.raises(ValueError, match=r"experimental_config\.frozen_param .*did you mean frozen_parameter"):
        torchair.compiler_config({"experimental_config.frozen_param": True})
    with pytest.raises(ValueError, match=r"no compiler option experimental\.frozen_parameter"):
        torchair.compiler_config({"experimental.frozen_parameter": True})
    with pytest.raises(Exception, match="StableRDF"):
        torchair.compiler_config({"experimental_config.topology_sorting_strategy": "StableRDF"})


def test_an_option_that_cache_compile_would_swallow_is_refused(monkeypatch) -> None:
    inner = importlib.import_module("torchair.inference._cache_compiler")
    monkeypatch.setattr(inner, "cache_compile", lambda func, *, config, dynamic, cache_dir, **kwargs: None)
    with pytest.raises(torchair.CompileError, match="no option ge_cache"):
        compile_tiny(tiny(), options())


def test_work_folders_are_removed() -> None:
    work = torchair.WorkFolder()
    path = work.path
    (path / "x").write_text("")
    assert list(work.files()) == ["x"]
    del work
    assert not path.exists()


def test_a_method_that_is_not_forward(tmp_path) -> None:
    class Named(Tiny):
        decode_step = Tiny.forward

    torch.manual_seed(0)
    model = Named().eval()
    x, cache = example()
    for status in ("miss", "hit"):
        found = look_method(model, x, cache, tmp_path)
        assert found.status == status
        compiled = found.compiled
        if compiled is None:
            program = tiny_program(model, x, cache)
            compiled = build(program, model, "decode_step", (x, cache), {}, options(tmp_path), found, {}, make_output)
        check_same_as_eager(compiled, model, x, cache)
        assert isinstance(compiled.artifact.module, EmittedModule)
        assert compiled.artifact.module.method_name.startswith("decode_step_")


def look_method(model: Tiny, x, cache, root: Path):
    from cannopy.backend.build import lookup

    assert look(model, (x, cache), options(root)).status == "miss"
    return lookup(model, "decode_step", (x, cache), {}, options(root), make_output)
