"""Multi-token prediction in one process: a compiled target checks what a compiled draft module proposes.

    python examples/mtp.py [--model deepseek-r1] [--next-n 2] [--requests 3] [--tokens 24]

Each step the target reads, per request, its last token and ``next_n`` drafts. Drafts are accepted as long as they are
what the target itself would have chosen, so the text is that of greedy decoding without drafts; only the number of
steps is smaller. Rows that rejected drafts have left in the caches lie behind the request's length and are written
again.

All calls have fixed shapes: a draft step reads the same ``1 + next_n`` positions per request as the target's step,
moved on by one for each further draft. Weights are random and in float32, so that the comparison at the end is exact;
the small vocabulary makes such a draft right now and then.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

import cannopy
from cannopy.models import zoo
from cannopy.models.deepseek import Deepseek, DeepseekDraft
from cannopy.models.lively import lively_
from cannopy.models.longcat import Longcat, LongcatDraft
from cannopy.models.requests import Requests, padding_slots
from cannopy.models.serving import Draft, ServingModel

BLOCK_SIZE = 16


def drafter(target: ServingModel, seed: int = 1) -> Draft:
    """The MTP module that belongs to ``target``, which it shares the head with."""
    kinds = {Deepseek: DeepseekDraft, Longcat: LongcatDraft}
    if type(target) not in kinds:
        raise SystemExit(f"{type(target).__name__} has no MTP module")
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    draft = lively_(kinds[type(target)](target), seed).eval()  # fills shared parameters too: put back
    with torch.no_grad():
        for name, p in target.named_parameters():
            p.copy_(before[name])
    return draft


@dataclass
class Speculation:
    """Requests that target and draft decode together; call `prefill` once, then `step`.

    ``texts``: tokens of each request, its prompt included. ``accepted`` of ``proposed`` drafts were right.
    """

    target: ServingModel
    draft: Draft
    next_n: int
    blocks_each: int
    options: cannopy.Options
    accepted: int = 0
    proposed: int = 0
    compiled: dict[tuple[torch.nn.Module, str], cannopy.Compiled] = field(default_factory=dict)

    def prefill(self, prompts: Sequence[Tensor]) -> None:
        """Read the prompts with both models; compiles all four methods."""
        self.texts = [p.tolist() for p in prompts]
        count = len(prompts)
        # The same seed gives both the same block table; each has a cache of its own.
        self.own, self.drafts = (Requests(m, count, self.blocks_each, BLOCK_SIZE) for m in (self.target, self.draft))
        tokens, ends, slots = self.own.prefill_inputs(prompts)
        logits, hidden = self._call(self.target, "prefill", tokens, ends, slots, self.own.cache)
        first = logits.argmax(-1)
        moved = torch.cat([torch.cat((p[1:], t[None])) for p, t in zip(prompts, first, strict=True)])
        logits, _ = self._call(self.draft, "prefill", moved, hidden, ends, slots, self.drafts.cache)
        for text, token in zip(self.texts, first.tolist(), strict=True):
            text.append(token)
        self.next = torch.zeros(count, self.next_n, dtype=torch.long)  # the first step has one draft, then zeros
        self.next[:, :1] = logits.argmax(-1)[:, None]

    def step(self) -> None:
        """One step of the target, then ``next_n`` of the draft."""
        window = 1 + self.next_n
        last = torch.tensor([text[-1] for text in self.texts])
        tokens = torch.cat((last[:, None], self.next), dim=1)
        logits, hidden = self._call(self.target, "decode", *self.own.decode_inputs(tokens), self.own.cache)
        chosen = logits.argmax(-1).view(-1, window)
        right = (chosen[:, :-1] == self.next).long().cumprod(dim=1).sum(1)
        for text, new, n in zip(self.texts, chosen.tolist(), right.tolist(), strict=True):
            text.extend(new[: n + 1])
        starts = [n - window for n in self.own.lengths]
        self.own.lengths = [s + 1 + n for s, n in zip(starts, right.tolist(), strict=True)]
        self.accepted += int(right.sum())
        self.proposed += right.numel() * self.next_n
        self._propose(chosen, hidden, starts, right)

    def _propose(self, tokens: Tensor, hidden: Tensor, starts: Sequence[int], right: Tensor) -> None:
        """``next_n`` draft steps: the first over the positions that the target has read, each further one later by one.

        ``tokens`` [requests, window] follow the positions from ``starts`` on; in every request those up to index
        ``right`` are known.
        """
        rows = torch.arange(len(starts))
        for draft in range(self.next_n):
            self.drafts.lengths = [s + draft for s in starts]
            packed, lengths, table, slots = self.drafts.decode_inputs(tokens)
            if draft:  # only one position per request is new: the rows of the others stay as they are
                new = torch.arange(tokens.shape[1]) == right[:, None]
                slots = torch.where(new.flatten(), slots, padding_slots(slots.numel(), BLOCK_SIZE))
            logits, hidden = self._call(self.draft, "decode", packed, hidden, lengths, table, slots, self.drafts.cache)
            guess = logits.view(*tokens.shape, -1)[rows, right].argmax(-1)
            self.next[:, draft] = guess
            tokens = tokens.roll(-1, dims=1)
            tokens[rows, right] = guess

    def _call(self, model: torch.nn.Module, method: str, *args: object) -> tuple[Tensor, Tensor]:
        if (model, method) not in self.compiled:
            options = replace(self.options, phase=method)
            self.compiled[model, method] = cannopy.compile(model, method, args, options=options)
        return self.compiled[model, method](*args)


def greedy(model: ServingModel, prompts: Sequence[Tensor], blocks_each: int, length: int) -> list[list[int]]:
    """What plain PyTorch gives without drafts, each text continued to ``length`` tokens behind its prompt."""
    requests = Requests(model, len(prompts), blocks_each, BLOCK_SIZE)
    with torch.no_grad():
        logits, _ = model.prefill(*requests.prefill_inputs(prompts), requests.cache)
        texts = [[*p.tolist(), t] for p, t in zip(prompts, logits.argmax(-1).tolist(), strict=True)]
        for _ in range(length - 1):
            last = torch.tensor([text[-1:] for text in texts])
            logits, _ = model.decode(*requests.decode_inputs(last), requests.cache)
            for text, token in zip(texts, logits.argmax(-1).tolist(), strict=True):
                text.append(token)
    return texts


def speculate(target: ServingModel, requests: int, next_n: int, length: int, options: cannopy.Options) -> Speculation:
    """Continue random prompts by at least ``length`` tokens; SystemExit unless the text is that of greedy decoding."""
    vocabulary = target.lm_head.out_features
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, vocabulary, (3 + 5 * b,), generator=generator) for b in range(requests)]
    # Blocks for the longest prompt, its continuation and a window of drafts behind that.
    blocks_each = -(-(len(prompts[-1]) + length + 3 * (1 + next_n)) // BLOCK_SIZE)
    run = Speculation(target, drafter(target), next_n, blocks_each, options)
    with torch.no_grad():
        run.prefill(prompts)
        while min(len(t) - len(p) for t, p in zip(run.texts, prompts, strict=True)) < length:
            if run.own.blocks_each * BLOCK_SIZE < max(run.own.lengths) + 2 * (1 + next_n):
                break  # one request has had so many drafts accepted that its blocks are full
            run.step()
    wanted = greedy(target, prompts, blocks_each, max(len(t) - len(p) for t, p in zip(run.texts, prompts, strict=True)))
    for text, plain in zip(run.texts, wanted, strict=True):
        if text != plain[: len(text)]:
            raise SystemExit(f"the texts differ:\n  with drafts {text}\n  greedy      {plain}")
    return run


def main() -> None:
    """Parse the command line, run, and say what was accepted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="deepseek-r1", choices=zoo.names())
    parser.add_argument("--next-n", type=int, default=2, choices=(1, 2, 3))
    parser.add_argument("--requests", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    preset = zoo.preset(args.model, "tiny")
    target = zoo.build_serving(replace(preset, config={**preset.config, "vocab_size": 16}), torch.float32)
    run = speculate(target, args.requests, args.next_n, args.tokens, cannopy.Options())
    new = sum(map(len, run.texts))
    print(f"{new} tokens, {run.accepted} of {run.proposed} drafts accepted; the texts are those of greedy decoding")


if __name__ == "__main__":
    main()
