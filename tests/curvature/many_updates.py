"""Run by tests/curvature/test_online.py: an online factor over many updates, beside the average it stands for.

Rows of a converged model: the same few directions, smaller and smaller, now and then nothing at all.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from rkfac.curvature.factor import DenseFactor, OnlineFactor, Start
from rkfac.curvature.moment import RowsMoment

D, MODES, SPAN = 24, 4, 3


def moment_of(rows: Tensor) -> RowsMoment:
    moment = RowsMoment()
    moment.add(rows)
    moment.settle([float(t) for t in moment.readings()])
    return moment


def main(updates: int) -> None:
    torch.set_num_threads(1)
    online = OnlineFactor((D,), Start(False), torch.empty(0))
    online.prepare(MODES, torch.Generator, "the factor")
    dense = DenseFactor((D,), Start(False), torch.empty(0, dtype=torch.float64))
    g = torch.Generator().manual_seed(3)
    span = torch.randn(SPAN, D, generator=g)
    worst = {"off_orthonormal": 0.0, "off_average": 0.0, "off_trace": 0.0}
    for step in range(updates):
        size = 10.0 ** -(18 * step / updates)
        rows = size * (torch.randn(2, SPAN, generator=g) @ span) * float(step % 7 != 3)
        online.take(moment_of(rows), 0.9)
        dense.take(moment_of(rows.double()), 0.9)
        if step % 10 and step != updates - 1:
            continue
        X, low = dense.dense(), online.kept
        U = low.U.double()
        found = {
            "off_orthonormal": U.mT @ U - torch.eye(low.rank).double(),
            "off_average": ((U * low.s) @ U.mT - X) / torch.linalg.norm(X),
            "off_trace": online.trace() / X.trace() - 1,
        }
        worst = {name: max(worst[name], float(off.abs().max())) for name, off in found.items()}
    finite = bool(torch.isfinite(online.kept.s).all() and torch.isfinite(online.kept.U).all())
    print(json.dumps({**worst, "finite": finite, "updates": online.updates}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
