# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: Flower routes each message by its action to the method's client."""

from flwr.clientapp import ClientApp

from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient

app = ClientApp()  # a plain assignment: Flower looks for it by syntax
serve(app, FedNLClient, action="fednl")
