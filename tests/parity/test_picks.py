"""Recording and replaying discrete picks."""

import pytest
import torch

from cannopy.parity.picks import Pick, Recorder, Replay, ReplayError

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.7], [0.8, 0.2, 0.3, 0.4]])


def test_recorder_keeps_topk_indices_in_order():
    with Recorder() as recorder:
        SCORES.topk(2, dim=-1)
        torch.topk(SCORES, 1)
    assert [pick.indices.tolist() for pick in recorder.picks] == [[[1, 3], [0, 3]], [[1], [0]]]
    assert [(pick.kind, pick.width) for pick in recorder.picks] == [("topk", 4), ("topk", 4)]


def test_recorder_ignores_topk_that_is_no_selection_over_features():
    with Recorder() as recorder:
        SCORES.topk(1, dim=0)
        SCORES.topk(1, dim=-1, largest=False)
    assert recorder.picks == []


def test_recorder_marks_masked_candidates_as_none():
    with Recorder() as recorder:
        torch.tensor([[1.0, -torch.inf, -torch.inf]]).topk(2)
    assert recorder.picks[0].indices.tolist() == [[0, -1]]


def test_recorder_knows_a_mask_that_was_added_to_the_scores():
    mask = torch.tensor([[0.0, torch.finfo(torch.float16).min, 0.0]])
    with Recorder() as recorder:
        (torch.tensor([[1.0, 8.0, -9.0]]) + mask).topk(3)
    assert recorder.picks[0].indices.tolist() == [[0, 2, -1]]


def test_recorder_sees_the_npu_ops():
    from cannopy.backend.host.kernels import register

    register()
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    with Recorder() as recorder:
        _, experts, _ = torch.ops.npu.npu_moe_gating_top_k(x, 4, k_group=2, group_count=4, norm_type=1)
    (pick,) = recorder.picks
    assert (pick.kind, pick.width) == ("experts", 16)
    assert torch.equal(pick.indices, experts.long())


def test_replay_returns_the_recorded_picks_with_this_runs_scores():
    with Replay([Pick("topk", torch.tensor([[2, 0], [1, 3]]), 4)]) as played:
        values, indices = SCORES.topk(2, dim=-1)
    played.finish()
    assert indices.tolist() == [[2, 0], [1, 3]]
    assert torch.equal(values, torch.tensor([[0.5, 0.1], [0.2, 0.4]]))
    (choice,) = played.choices
    assert choice.own.tolist() == [[1, 3], [0, 3]]
    assert choice.differs.tolist() == [True, True]


def test_replay_pads_missing_picks_with_masked_candidates():
    scores = torch.tensor([[0.3, 0.6, -torch.inf, -torch.inf]])
    with Replay([Pick("keys", torch.tensor([[1, 0, -1]]))]) as played:
        indices = scores.topk(3).indices
    assert indices.tolist() in ([[1, 0, 2]], [[1, 0, 3]])
    assert played.choices[0].differs.tolist() == [False]


def test_replay_leaves_other_topk_calls_alone():
    with Replay([Pick("keys", torch.tensor([[0, 1], [0, 1]]))]) as played:
        inner = SCORES.view(4, 2).topk(1).indices
        SCORES.topk(2)
    played.finish()
    assert inner.tolist() == [[1], [1], [0], [1]]


def test_replay_makes_the_group_choice_agree_with_the_experts():
    """Group scores prefer groups 2 and 3; the recorded experts are in group 0 and 1."""
    groups = torch.tensor([[0.1, 0.2, 0.8, 0.9]])
    with Replay([Pick("experts", torch.tensor([[1, 5]]), 16)]) as played:
        chosen = groups.topk(2).indices
        experts = torch.rand(1, 16).topk(2).indices
    played.finish()
    assert sorted(chosen[0].tolist()) == [0, 1]
    assert experts.tolist() == [[1, 5]]


def test_replay_fills_groups_with_the_best_others():
    groups = torch.tensor([[0.1, 0.2, 0.8, 0.9]])
    with Replay([Pick("experts", torch.tensor([[1, 2]]), 16)]):
        chosen = groups.topk(2).indices
    assert sorted(chosen[0].tolist()) == [0, 3]


def test_unused_picks_are_an_error_that_names_them():
    with Replay([Pick("experts", torch.zeros(2, 4, dtype=torch.long), 16)]) as played:
        SCORES.topk(2)
    with pytest.raises(ReplayError, match=r"pick 1 of 1 .*experts, 2 rows, 4 of 16.* has no topk in the eager run"):
        played.finish()
