"""Merge methods on one tensor, written plainly in float64 from the papers; and values by layer, from their definition.

`base` is a tensor, `models` are the tensors of the tasks.
"""

import itertools
import math

import torch
from torch import Tensor


def average(base: Tensor, models: list[Tensor], weight: list[float]) -> Tensor:
    return sum(w * model.double() for w, model in zip(weight, models, strict=True)) / sum(weight)


def task_arithmetic(base: Tensor, models: list[Tensor], weight: list[float]) -> Tensor:
    return base.double() + sum(w * (m.double() - base.double()) for w, m in zip(weight, models, strict=True))


def ties_by_tensor(
    base: Tensor, models: list[Tensor], weight: list[float], density: list[float], normalize: bool, scale: float
) -> Tensor:
    """Element by element: who was kept, which sign wins, who agrees."""
    vectors = []
    for model, share in zip(models, density, strict=True):
        vector = (model - base).flatten()
        order = sorted(range(len(vector)), key=lambda i, v=vector: -abs(float(v[i])))
        kept = set(order[: max(1, int(share * len(vector)))])
        vectors.append([float(vector[i]) if i in kept else 0.0 for i in range(len(vector))])
    out = base.double().flatten()
    for i in range(len(out)):
        votes = [w * vector[i] for w, vector in zip(weight, vectors, strict=True)]
        sign = 1 if sum(votes) >= 0 else -1
        agree = [t for t, vector in enumerate(vectors) if vector[i] * sign > 0]
        divisor = sum(weight[t] for t in agree) if normalize and agree else 1.0
        out[i] += scale * sum(votes[t] for t in agree) / (divisor or 1.0)
    return out.view(base.shape)


def model_stock(base: Tensor, models: list[Tensor], filter_wise: bool, away: bool) -> Tensor:
    """Each row, or the whole tensor, by itself."""
    if filter_wise and base.ndim > 1:
        return torch.stack([model_stock(b, [m[i] for m in models], False, away) for i, b in enumerate(base)])
    vectors = [(model.double() - base.double()).flatten() for model in models]
    pairs = itertools.combinations(vectors, 2)
    cosine = sum(float(torch.cosine_similarity(a, b, 0)) for a, b in pairs) / math.comb(len(models), 2)
    cosine = cosine if away else max(cosine, 0.0)
    count = len(models)
    t = count * cosine / (1 + (count - 1) * cosine)
    return t * sum(model.double() for model in models) / count + (1 - t) * base.double()


def slerp(first: Tensor, second: Tensor, t: float) -> Tensor:
    """The unit vectors at the ends of the arc, written as a rotation in their plane, then the lengths."""
    a, b = first.double().flatten(), second.double().flatten()
    angle = torch.acos((a / a.norm()) @ (b / b.norm()))
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b).div(torch.sin(angle)).view(first.shape)


def fisher(base: Tensor, models: list[Tensor], information: list[Tensor], weight: list[float], floor: float) -> Tensor:
    """Element by element; the plain average where nobody knows anything."""
    least = floor * sum(float(values.double().mean()) for values in information) / len(information)
    out = base.double().flatten()
    for i in range(len(out)):
        shares = [w * (float(f.flatten()[i]) + least) for w, f in zip(weight, information, strict=True)]
        shares = shares if sum(shares) else weight
        values = [float(model.flatten()[i]) for model in models]
        out[i] = sum(share * value for share, value in zip(shares, values, strict=True)) / sum(shares)
    return out.view(base.shape)


def regmean(models: list[Tensor], grams: list[Tensor], alpha: float) -> Tensor:
    """Of weights `[outputs, inputs]`: the inverse as the paper prints it."""
    grams = [alpha * gram.double() + (1 - alpha) * torch.diag(torch.diag(gram.double())) for gram in grams]
    right = sum(gram @ model.double().T for gram, model in zip(grams, models, strict=True))
    return (torch.linalg.inv(sum(grams)) @ right).T


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
