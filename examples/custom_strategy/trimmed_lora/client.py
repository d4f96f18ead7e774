"""``NormClient``: FedNL's client, which also says how far it moved the adapter."""

import numpy as np

from fedloom.clients.fednl import FedNLClient


class NormClient(FedNLClient):
    """Add the metric ``moved``: the norm of what training changed."""

    def fit(self, parameters, config):
        """Train as FedNL does, then measure."""
        before = dict(zip(self.array_names, parameters, strict=True))
        arrays, examples, metrics = super().fit(parameters, config)
        sent = dict(zip(self.array_names, arrays, strict=True))
        square = sum(float(np.sum((sent[n] - before[n]) ** 2.0)) for n in sent)
        return arrays, examples, {**metrics, "moved": square**0.5}
