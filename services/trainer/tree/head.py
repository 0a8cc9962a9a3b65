"""Targets scored through the model head, a chunk of rows at a time."""

import torch
from services.trainer.backends.head import HeadChunk


def target_scores(rows, head, ids, temperature, n, autocast):
    l, e = [], []
    for s in range(0, len(rows), n):
        c = HeadChunk(head(rows[s : s + n]), ids[s : s + n], temperature)
        l.append(c.logprobs)
        e.append(c.entropy)
    return torch.cat(l), torch.cat(e)


def backward_through_head(rows, head, ids, temperature, n, slope_of, autocast):
    leaf = rows.requires_grad_()
    for s in range(0, len(rows), n):
        p = slice(s, s + n)
        with autocast():
            logits = head(leaf[p])
        c = HeadChunk(logits.detach(), ids[p], temperature)
        slope = slope_of(p, c.logprobs, c.entropy)
        logits.backward(c.gradient(slope.to(c.logprobs.dtype)).to(logits.dtype))
    return leaf.grad
