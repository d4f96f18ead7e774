"""``TrimmedLora``: a few clients with wild values cannot move the adapter (arXiv 1803.01498)."""

import numpy as np

from fedloom.errors import Refusal
from fedloom.strategies import FedNL
from fedloom.wire import Update


class TrimmedLora(FedNL):
    """Leave out each coordinate's most extreme values and average the rest, each client once.

    With ``server.rule = "ffa"`` all clients have one A, so what is trimmed, B, is in one frame.
    """

    own_keys = {"trim": 1}  # noqa: RUF012

    def fold(self, updates, sent):
        """Fold; what the rule leaves at home stays as it was sent."""
        trim = int(self.custom["trim"])
        if trim < 0:
            raise Refusal(f"custom.trim = {trim}: expected 0 or more values to leave out")
        made = trimmed_mean(updates, trim)
        return {n: made[n].astype(a.dtype) if n in made else a for n, a in sent.items()}


def trimmed_mean(updates, trim):
    """Keep a running sum and the ``trim`` smallest and largest: memory for ``2 trim + 1``."""
    total, low, high = None, {}, {}
    for update in updates:
        values = update.mean()
        one = Update.of(values, 1.0)
        total = one if total is None else total + one
        for name, value in values.items():
            for kept, ends in ((low, slice(trim)), (high, slice(-trim, None))):
                stack = np.stack([*kept.get(name, []), value])
                kept[name] = np.sort(stack, axis=0)[ends] if trim else stack[:0]
    drop = min(trim, int(total.weight - 1) // 2)  # of few clients, the median is left
    for i in range(drop):
        total = total + -Update.of({n: x[i] for n, x in low.items()}, 1.0)
        total = total + -Update.of({n: x[-1 - i] for n, x in high.items()}, 1.0)
    return total.mean()
