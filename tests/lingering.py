"""Clients of one's own: one says when it is amid reading, to be killed there; one refuses.

They are installed on the nodes by the Python path and named in the recipe, as a user's own are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from fedloom.clients.refine import FedRefineClient
from fedloom.errors import Refusal
from fedloom.refining import measured


class LingeringClient(FedRefineClient):
    """FedRefine's own; partition ``custom.lingers`` stops between its two layers."""

    own_keys: Mapping[str, int | str] = {"lingers": -1, "flag": ""}

    def export_cache(self, arrays, config):
        if self.custom["lingers"] == self.partition_id:
            model = self.base.model
            measured(self.base)  # its own passes come before
            model.get_decoder().layers[0].register_forward_hook(self._linger)
        return super().export_cache(arrays, config)

    def _linger(self, layer, given, made):
        Path(str(self.custom["flag"])).write_text(f"{tuple(given[0].shape)}")
        time.sleep(600)


class ReluctantClient(FedRefineClient):
    """Reads for nobody."""

    def export_cache(self, arrays, config):
        raise Refusal("this one reads for nobody: ask another")
