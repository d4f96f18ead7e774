# SPDX-License-Identifier: Apache-2.0
"""The ClientApp: Flower routes each message by its action to the method's client."""

from fedloom.clients.bridge import serve
from fedloom.clients.fednl import FedNLClient
from flwr.clientapp import ClientApp

app = ClientApp()  # a plain assignment: Flower looks for it by syntax
serve(app, FedNLClient, action="fednl")
