"""Kernels and memory of analytic steps against numbers that can be computed by hand."""

from __future__ import annotations

import pytest

from cannopy.models import zoo
from cannopy.stream_scheduler.constants import load_constants
from cannopy.stream_scheduler.cost import kernel_names
from cannopy.stream_scheduler.hardware import load_hardware
from cannopy.stream_scheduler.network.builder import Scene
from cannopy.stream_scheduler.network.memory import cache_total, memory, weight_bytes
from cannopy.stream_scheduler.network.model import load_model, model_names
from cannopy.stream_scheduler.network.pricing import Pricing
from cannopy.stream_scheduler.network.regions import FUSED
from cannopy.stream_scheduler.network.report import placement_of
from cannopy.stream_scheduler.network.setting import Load, Parallel, Placement, Quantisation, SettingError
from cannopy.stream_scheduler.network.step import build
from cannopy.stream_scheduler.simulator import Schedule

A3 = load_hardware("atlas-a3")
PRICING = Pricing(A3, load_constants())


def step(name: str, load: Load, parallel: str = "", quant: str = "bf16", plan: str = "serial") -> Schedule:
    model = load_model(name)
    placement = placement_of(model, A3, plan)
    return build(model, load, Parallel.parse(parallel), Quantisation.parse(quant), placement, PRICING)


@pytest.mark.parametrize(("name", "parameters"), [
    ("deepseek-v3", 671e9), ("kimi-k2", 1.03e12), ("longcat-flash", 560e9), ("longcat-flash-lite", 68.5e9),
    ("qwen2.5-7b", 7.6e9), ("qwen2.5-72b", 72.7e9), ("qwen3-30b-a3b", 30.5e9), ("qwen3-235b-a22b", 235e9),
])
def test_weights_of_one_die_add_up_to_the_published_size(name: str, parameters: float) -> None:
    scene = Scene(load_model(name), Load(), Parallel(), Quantisation())
    assert weight_bytes(scene) / 2 == pytest.approx(parameters, rel=0.02)


def test_indexer_key_cache_of_four_long_sequences() -> None:
    """4 × 64K × 61 layers × 128 × 2 B = 4.094 GB beside the latent cache (576 × 2 B a row)."""
    with_indexer, without = (
        cache_total(Scene(load_model(name), Load("decode", 4, 65536 - 128), Parallel(), Quantisation()))
        for name in ("deepseek-v3.2", "deepseek-v3")
    )
    assert with_indexer - without == pytest.approx(4.094e9, rel=2e-3)
    assert without == pytest.approx(61 * 4 * 65536 * 576 * 2, rel=2e-3)


def test_every_zoo_model_is_described_with_its_full_size() -> None:
    names = {"hidden_size": "hidden", "num_hidden_layers": "layers", "vocab_size": "vocab",
             "intermediate_size": "dense_width"}
    for name in zoo.names():
        model, config = load_model(name), zoo.preset(name, "full").config
        for key, field in names.items():
            assert getattr(model, field) == config.get(key, getattr(model, field)), (name, key)
        assert model.attention.heads == config.get("num_attention_heads", model.attention.heads), name


def test_every_described_model_builds_in_both_phases() -> None:
    for name in model_names():
        for phase in ("decode", "prefill"):
            schedule = step(name, Load(phase, 1, 1024), quant="w8a8")
            assert schedule.tasks, (name, phase)
            assert len({task.name for task in schedule.tasks}) == len(schedule.tasks)


def test_expert_structure_of_a_sparse_layer() -> None:
    schedule = step("deepseek-v3.2", Load("decode", 2, 65536, 3), "ep=128,dp=128,o_proj_tp=4,dense_tp=4", "w8a8c8",
                    "expert")
    layer = [task for task in schedule.tasks if task.layer == 5]
    labels = [task.label for task in layer]
    assert labels.index("dispatch") < labels.index("experts_gate_up") < labels.index("combine")
    assert {task.stream for task in layer} == {"main", "indexer_q", "indexer_weights", "shared"}
    sizes = {task.label: task.load.work.sizes for task in layer}  # type: ignore[attr-defined]
    assert sizes["o_proj"] | {} == {"m": 32, "k": 4096, "n": 7168}
    assert sizes["experts_gate_up"]["tokens"] == 128 * 8
    assert sizes["experts_gate_up"]["local_experts"] == 2
    assert schedule.graphs == 4


def test_prefetches_are_whole_weights_and_wait_for_tasks_before_their_reader() -> None:
    schedule = step("longcat-flash", Load("decode", 4, 4608), "ep=128,dp=128,o_proj_tp=8,dense_tp=8", "w8a8", "expert")
    order = {task.name: i for i, task in enumerate(schedule.tasks)}
    assert len(schedule.prefetches) == 28 * 7 - 1
    assert all(order[p.after] < order[p.weight] for p in schedule.prefetches)
    router = next(p for p in schedule.prefetches if p.weight == "5.router")
    assert router.bytes == 6144 * 768 * 4
    limits = {task.cores for task in schedule.tasks if task.layer == 5}
    assert limits == {None, (16, 32), (8, 16)}


def test_layouts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(SettingError, match="has no experts"):
        step("qwen2.5-7b", Load(), "ep=8")
    with pytest.raises(SettingError, match="4 heads of keys cannot be divided by attn_tp=7, nor shared"):
        step("qwen2.5-7b", Load(), "attn_tp=7")
    with pytest.raises(SettingError, match="cannot be divided by attn_tp=3"):
        step("deepseek-r1", Load(), "attn_tp=3")
    with pytest.raises(SettingError, match=r"spread .* or cut"):
        step("deepseek-r1", Load(), "ep=8,moe_tp=8")
    with pytest.raises(SettingError, match="12 dies cannot be divided"):
        step("deepseek-r1", Load(), "dp=12,dense_tp=8")


def test_quantisation_halves_what_it_names() -> None:
    model, parallel = load_model("deepseek-v3.2"), Parallel.parse("ep=32,dp=32")
    found = {name: memory(Scene(model, Load("decode", 1, 65536), parallel, Quantisation.parse(name)), A3.hbm_bytes,
                          load_constants())
             for name in ("bf16", "w8a8c16", "w8a8c8", "w4a8c8")}
    experts = 58 * 8 * 3 * 7168 * 2048
    assert found["w8a8c8"].weights - found["w4a8c8"].weights == pytest.approx(experts / 2)
    assert found["w8a8c16"].caches == found["bf16"].caches
    assert found["w8a8c8"].caches == pytest.approx(found["bf16"].caches * (656 + 130) / (1152 + 256))


def test_a_placement_changes_order_constraints_only() -> None:
    model = load_model("deepseek-r1")
    load, parallel, quant = Load("decode", 1, 4096), Parallel.parse("ep=32,dp=32"), Quantisation.parse("w8a8")
    serial = build(model, load, parallel, quant, Placement(), PRICING)
    side = build(model, load, parallel, quant, Placement(side_stream=True), PRICING)
    assert [t.name for t in serial.tasks] == [t.name for t in side.tasks]
    assert all(set(a.deps) <= set(b.deps) for a, b in zip(serial.tasks, side.tasks, strict=True))


def test_experts_of_dies_that_share_heads_divide_the_tokens_and_gather_the_sums() -> None:
    """Eight dies with the same 16 tokens: two rows of each go out from a die, all 16 come together again."""
    schedule = step("qwen3-235b-a22b", Load("decode", 16, 4096), "attn_tp=8,ep=8")
    sizes = {task.label: dict(task.load.work.sizes) for task in schedule.tasks if task.layer == 0}
    assert sizes["dispatch"]["tokens"] == 2
    assert sizes["experts_all_gather"] == {"ranks": 8, "bytes_per_rank": 2 * 2 * 4096}
    assert sizes["experts_gate_up"]["tokens"] == 16
    alone = step("qwen3-235b-a22b", Load("decode", 16, 4096), "attn_tp=8")
    sizes = {task.label: dict(task.load.work.sizes) for task in alone.tasks if task.layer == 0}
    assert sizes["init_routing"]["tokens"] == sizes["experts_gate_up"]["tokens"] == sizes["finalize"]["tokens"] == 2


def test_rows_of_latent_caches_over_dies() -> None:
    """Four dies with the same 2 requests of 4 queries: each query a request with a quarter of 4096 rows, all 128 heads;
    results of 32 heads after the exchange. A prompt cuts heads; dispatch sends a quarter of the tokens."""
    schedule = step("deepseek-r1", Load("decode", 2, 4096, 3), "kvp=4,ep=8,dense_tp=4,embed_tp=4,lm_head_tp=2")
    sizes = {task.label: dict(task.load.work.sizes) for task in schedule.tasks if task.layer in (0, 4, None)}
    assert sizes["mla_prolog"]["heads"] == 128
    assert {k: sizes["attention"][k] for k in ("batch", "q_tokens", "context", "heads")} == {
        "batch": 8, "q_tokens": 1, "context": 1024, "heads": 128}
    assert sizes["kvp_all_to_all"] == {"ranks": 4, "bytes_per_rank": 2 * 8 * 128 * 512}
    assert sizes["kvp_sums_all_to_all"] == {"ranks": 4, "bytes_per_rank": 4 * 8 * 128}
    assert (sizes["attention_update"]["elements"], sizes["attention_update"]["inputs"]) == (8 * 32 * 512, 4)
    assert sizes["w_uv"]["batch"] == 32
    assert sizes["o_proj"]["k"] == 32 * 128
    for label in ("o_proj_all_reduce", "mlp_all_reduce", "embed_all_reduce"):
        assert sizes[label] == {"ranks": 4, "bytes_per_rank": 2 * 8 * 7168}
    assert sizes["dispatch"]["tokens"] == 2
    assert sizes["lm_head_all_gather"]["ranks"] == 2
    prompt = step("deepseek-r1", Load("prefill", 1, 4096), "kvp=4,ep=8")
    sizes = {task.label: dict(task.load.work.sizes) for task in prompt.tasks if task.layer in (0, 4)}
    assert (sizes["attention"]["heads"], sizes["o_proj_all_reduce"]["ranks"]) == (32, 4)
    assert "kvp_all_to_all" not in sizes
    assert sizes["mlp_down"]["k"] == 18432


def test_caches_of_one_of_several_dies_have_a_part_of_the_blocks() -> None:
    """513 blocks of 128 rows for a request of 64K tokens, and block 0: 129 on each of four dies."""
    model, load = load_model("deepseek-r1"), Load("decode", 1, 65536)
    alone, part = (cache_total(Scene(model, load, Parallel.parse(text), Quantisation())) for text in ("", "kvp=4"))
    assert alone == 61 * 514 * 128 * 576 * 2
    assert part == 61 * 129 * 128 * 576 * 2


def test_weights_in_memory_are_those_that_the_kernels_of_a_die_read() -> None:
    """With so many tokens that every expert is active; the embedding is read by rows and not compared."""
    for name, parallel in (("deepseek-v3", "attn_tp=8,moe_tp=8"), ("qwen3-32b", "attn_tp=4"),
                           ("deepseek-v3.2", "ep=16,dp=16,o_proj_tp=4,dense_tp=4"),
                           ("longcat-flash", "ep=32,dp=32,dense_tp=8,o_proj_tp=8"),
                           ("qwen3-235b-a22b", "attn_tp=8,ep=8"), ("deepseek-v3", "kvp=8,moe_tp=4,lm_head_tp=2"),
                           ("longcat-flash", "kvp=16,ep=32,dense_tp=8")):
        layout, model = Parallel.parse(parallel), load_model(name)
        for quant in ("bf16", "w8a8c16", "w4a8c16"):
            load = Load("decode", 4096, 4096)
            tasks = step(name, load, parallel, quant).tasks
            read = sum(t.load.work.weight_bytes for t in tasks
                       if t.label != "embedding" and "norm" not in t.load.kernel)
            held = weight_bytes(Scene(model, load, layout, Quantisation.parse(quant)))
            assert read == pytest.approx(held - 2 * model.vocab * model.hidden, rel=0.01), (name, quant)


def test_a_kernel_fuses_into_a_super_kernel_in_each_of_its_dtypes() -> None:
    assert set(kernel_names()) >= FUSED
    stems = {name.removesuffix("_int8") for name in FUSED}
    assert not [name for name in kernel_names() if name.removesuffix("_int8") in stems and name not in FUSED]


def test_data_parallel_dies_that_share_experts_gather_their_tokens() -> None:
    schedule = step("qwen3-235b-a22b", Load("decode", 2, 4096), "dp=8,moe_tp=8")
    sizes = {task.label: dict(task.load.work.sizes) for task in schedule.tasks if task.layer == 0}
    assert sizes["moe_all_gather"] == sizes["moe_reduce_scatter"] == {"ranks": 8, "bytes_per_rank": 2 * 2 * 4096}
    assert sizes["experts_gate_up"]["tokens"] == sizes["finalize"]["tokens"] == 16
    same = step("qwen3-235b-a22b", Load("decode", 2, 4096), "attn_tp=8,moe_tp=8")
    sizes = {task.label: dict(task.load.work.sizes) for task in same.tasks if task.layer == 0}
    assert sizes["experts_gate_up"]["tokens"] == 2
    assert "moe_all_gather" not in sizes
    assert "moe_all_reduce" in sizes
