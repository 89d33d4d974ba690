"""The key side of MLA where the prolog takes none of it: prompts of our zoo's layer, and mutants of its graph."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx, nn

from cannopy.backend.host import target
from cannopy.backend.host.activate import activate
from cannopy.frontend.capture import capture
from cannopy.frontend.state import prepare_state
from cannopy.fusion_rules import catalog, dialect
from cannopy.fusion_rules.rewrite import kv_rmsnorm_rope_cache
from cannopy.fx_passes import normalise
from cannopy.fx_passes.graph import Editor, aten, is_call
from cannopy.fx_passes.program import Program
from cannopy.models.lively import lively_
from cannopy.models.parts import RMSNorm, rotate_halves, rotate_interleaved
from tests.rules.support import Case, fresh, fuse, run, targets

Tensor = torch.Tensor
RULES = (*catalog.LIFT, kv_rmsnorm_rope_cache.RULE)
H, TOKENS, NOISE = 64, 5, 2.0**-6
"""Latents are rounded once less than in the model."""


class Keys(nn.Module):
    """The key side alone: ``paged`` writes rows of blocks, else positions of two requests of a static cache."""

    def __init__(self, paged: bool, reads: bool) -> None:
        super().__init__()
        self.paged, self.reads = paged, reads
        self.down = nn.Linear(H, 576, bias=False)
        self.norm = RMSNorm(512, 1e-5)

    def forward(self, x: Tensor, angles: Tensor, index: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, ...]:
        latent, rope = self.down(x).split([512, 64], dim=-1)
        rows = self.norm(latent)
        turned = rotate_interleaved(rope, angles.cos(), angles.sin())
        for cache, new in ((latents, rows), (ropes, turned)):
            if self.paged:
                cache.flatten(0, 1).index_copy_(0, index, new[:, None])
            else:
                cache.index_copy_(2, index, new[:, None])
        return (rows + 1, turned * 2) if self.reads else (latents.sum(-1), ropes.sum(-1))


@functools.cache
def keys(paged: bool, reads: bool, length: int = 32) -> Case:
    """Captured; do not change it."""
    activate()
    dialect.register_all()
    module = lively_(Keys(paged, reads), 0).bfloat16().eval()
    generator = torch.Generator().manual_seed(1)

    def r(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16()

    if paged:
        args = (r(TOKENS, H), r(TOKENS, 64), torch.tensor([3, 40, 41, 17, 0]), r(3, 16, 1, 512), r(3, 16, 1, 64))
    else:
        args = (r(2, TOKENS, H), r(1, TOKENS, 64), torch.arange(TOKENS) + 7, r(2, 1, length, 512), r(2, 1, length, 64))
    prepare_state(module, args, {})
    program = capture(module, "forward", args, {})
    normalise.run(program)
    return Case(module, args, {}, program)


@pytest.fixture(autouse=True, scope="module")
def _on_host() -> Iterator[None]:
    activate()
    with target.using("atlas-a3"):
        yield


def _agree(c: Case, old: Program, new: Program) -> None:
    (expected, state), (found, new_state) = run(c, old), run(c, new)
    for a, b in zip((*expected, *state.values()), (*found, *(new_state[k] for k in state)), strict=True):
        assert float((a.double() - b.double()).norm() / a.double().norm()) < NOISE


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "static"])
@pytest.mark.parametrize("reads", [True, False], ids=["rows read", "caches read"])
def test_fires_on_both_kinds_of_cache(paged: bool, reads: bool) -> None:
    c = keys(paged, reads)
    program = fresh(c)
    log = fuse(program, RULES)
    assert log.counts()["kv_rmsnorm_rope_cache"] == 1
    assert log.misses == []
    left = targets(program)
    assert not any(t.startswith(("cannopy", "aten.index_copy")) for t in left)
    (node,) = (n for n in program.gm.graph.nodes if "kv_rmsnorm" in str(n.target))
    assert [node.args[i].op for i in (5, 6)] == ["placeholder", "placeholder"]
    assert node.kwargs["is_output_kv"] is reads
    _agree(c, fresh(c), program)


def _one(program: Program, width: int) -> fx.Node:
    """The write of the cache of that width."""
    return next(n for n in program.gm.graph.nodes if is_call(n, aten.index_copy.default)
                and n.meta["val"].shape[-1] == width)


def _squash(program: Program, node: object) -> None:
    assert isinstance(node, fx.Node)
    editor, users = Editor(program.gm), list(node.users)
    with editor.before(node.next, like=node):
        new = editor.call(aten.tanh.default, node)
    for user in users:
        user.replace_input_with(node, new)


def _squashed_latent(program: Program) -> None:
    _squash(program, _one(program, 512).args[3])


def _squashed_projection(program: Program) -> None:
    """The latent is of another projection than the rotated part."""
    whole = next(n for n in program.gm.graph.nodes if is_call(n, aten.slice.Tensor) and n.args[2:4] == (0, 512))
    _squash(program, whole)


def _moved(program: Program) -> None:
    write, editor = _one(program, 512), Editor(program.gm)
    with editor.before(write):
        write.replace_input_with(write.args[2], editor.call(aten.add.Tensor, write.args[2], 1))  # type: ignore[arg-type]


def _computed_cache(program: Program) -> None:
    write, editor = _one(program, 512), Editor(program.gm)
    with editor.before(write):
        write.replace_input_with(write.args[0], editor.call(aten.tanh.default, write.args[0]))  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "latent": (_squashed_latent, "no normalised latent of the same projection is written"),
    "projection": (_squashed_projection, "no normalised latent of the same projection is written"),
    "rows": (_moved, "no normalised latent of the same projection is written"),
    "cache": (_computed_cache, "is not an input of the graph"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_refuses(name: str) -> None:
    c, (change, reason) = keys(True, True), MUTANTS[name]
    before, after = fresh(c), fresh(c)
    for program in (before, after):
        change(program)
        program.gm.recompile()
    log = fuse(after, RULES)
    assert "kv_rmsnorm_rope_cache" not in log.counts()
    assert any(reason in m.reason for m in log.misses), [m.reason for m in log.misses]
    _agree(c, before, after)


def test_refuses_a_cache_that_blocks_do_not_divide() -> None:
    c = keys(False, True, 42)
    program = fresh(c)
    log = fuse(program, RULES)
    assert any("is not a multiple of 16" in m.reason for m in log.misses)
    _agree(c, fresh(c), program)


def test_refuses_caches_with_other_dims_in_front() -> None:
    """The same positions are other rows where the requests stand behind the positions."""
    def forward(self: nn.Module, x: Tensor, angles: Tensor, index: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
        latent, rope = self.down(x).split([512, 64], dim=-1)
        latents.index_copy_(0, index, self.norm(latent).reshape(TOKENS, 2, 512))
        ropes.index_copy_(2, index, rotate_interleaved(rope, angles.cos(), angles.sin())[:, None])
        return latents.sum(-1) + 0 * ropes.sum()

    kind = type("Behind", (Keys,), {"forward": forward})
    module = lively_(kind(False, False), 0).bfloat16().eval()
    x, angles, index, latents, ropes = keys(False, False).args
    args = (x, angles, index, latents.reshape(32, 2, 512), ropes)
    prepare_state(module, args, {})
    program = capture(module, "forward", args, {})
    normalise.run(program)
    c = Case(module, args, {}, program)
    program = fresh(c)
    log = fuse(program, RULES)
    assert "kv_rmsnorm_rope_cache" not in log.counts()
    assert any("no normalised latent of the same projection is written" in m.reason for m in log.misses)
    _agree(c, fresh(c), program)


def test_heads_of_another_attention_are_no_near_miss() -> None:
    """Keys of several heads that are rotated in pairs and cached, as GLM's are."""
    def forward(self: nn.Module, x: Tensor, angles: Tensor, index: Tensor, cache: Tensor, other: Tensor) -> Tensor:
        heads = self.down(x).view(*x.shape[:2], 9, 64).transpose(1, 2)
        cache.index_copy_(2, index, rotate_interleaved(heads, angles.cos(), angles.sin()))
        return cache.sum() + other.sum()

    kind = type("Heads", (Keys,), {"forward": forward})
    module = lively_(kind(False, False), 0).bfloat16().eval()
    args = (torch.ones(2, TOKENS, H).bfloat16(), torch.ones(1, TOKENS, 64).bfloat16(), torch.arange(TOKENS),
            torch.zeros(2, 9, 32, 64).bfloat16(), torch.zeros(1).bfloat16())
    prepare_state(module, args, {})
    program = capture(module, "forward", args, {})
    normalise.run(program)
    log = fuse(program, RULES)
    assert "lift_rotary" in log.counts()
    assert log.misses == []


def _changed(change: Callable[[nn.Module], None], **methods: Callable[..., object]) -> Case:
    """The static form with another module or method."""
    module = lively_(type("Changed", (Keys,), methods)(False, True), 0).bfloat16().eval()
    change(module)
    args = keys(False, True).args
    program = capture(module, "forward", args, {})
    normalise.run(program)
    return Case(module, args, {}, program)


def test_the_projection_may_have_a_bias() -> None:
    def biased(module: nn.Module) -> None:
        module.down = lively_(nn.Linear(H, 576), 1).bfloat16()

    c = _changed(biased)
    program = fresh(c)
    assert fuse(program, RULES).counts()["kv_rmsnorm_rope_cache"] == 1
    _agree(c, fresh(c), program)


def test_a_rotation_of_halves_is_named() -> None:
    def forward(self: nn.Module, x: Tensor, angles: Tensor, index: Tensor, latents: Tensor, ropes: Tensor) -> Tensor:
        latent, rope = self.down(x).split([512, 64], dim=-1)
        latents.index_copy_(2, index, self.norm(latent)[:, None])
        angles = torch.cat((angles[..., :32],) * 2, dim=-1)
        ropes.index_copy_(2, index, rotate_halves(rope, angles.cos(), angles.sin())[:, None])
        return latents.sum() + ropes.sum()

    program = fresh(_changed(lambda _: None, forward=forward))
    (miss,) = fuse(program, RULES).misses
    assert "expected a rotation of neighbouring pairs (rope_interleave=True), found a rotation of halves" in miss.reason
    assert miss.remedy == "make it a rotation of neighbouring pairs (rope_interleave=True)"


def test_refuses_sizes_of_other_models() -> None:
    c = keys(True, True)
    program = fresh(c)
    log = fuse(program, RULES, target="atlas-950")
    assert any("products" in m.clause for m in log.misses if m.rule == "kv_rmsnorm_rope_cache")
