# SPDX-License-Identifier: Apache-2.0
"""Adapters of one's own beside the averaged one: Ditto, and fine-tuning at the end."""

from __future__ import annotations

from dataclasses import replace

from fedloom.local.work import Plain, Trained, Work
from fedloom.training import Pull
from fedloom.wire import Arrays


class FineTune(Plain):
    """FedAvg, then local steps from the last global adapter; the tuned one is kept at home."""

    def is_personal(self, work: Work) -> bool:
        """Tune once, after the last round."""
        return work.last

    def personalise(self, work: Work, received: Arrays) -> None:
        """Train as in a round."""
        steps = work.config.local.fine_tune_steps or work.steps
        replace(work, steps=steps).train("fine-tuning")
        work.home.keep("personal", work.adapter.arrays(), work.round)


class Ditto(Plain):
    """A personal adapter ``v_k``, pulled towards the received one (arXiv 2012.04221, Algorithm 1).

    ``v_k`` minimises ``loss + lambda / 2 |v_k - theta|^2`` for as many steps as theta gets, and
    starts at the theta that its client first receives.  The global adapter is FedAvg's.
    """

    def fit(self, work: Work, received: Arrays) -> Trained:
        """Train the personal adapter, then the global one."""
        self.personalise(work, received)
        pull = Pull(work.config.local.ditto_pull, anchors=work.tensors(received))
        own = work.train("personal", hooks=(pull,))
        work.home.keep("personal", work.adapter.arrays(), work.round)
        work.adapter.load(dict(received))
        return Trained(work.train(), {"own-loss": own.loss})

    def is_personal(self, work: Work) -> bool:
        """Score it wherever the global one is scored."""
        return True

    def personalise(self, work: Work, received: Arrays) -> None:
        """Take ``v_k`` from home; a client that never trained has the global adapter."""
        if (own := work.home.find("personal", work.round)) is not None:
            work.adapter.load(own)
