# SPDX-License-Identifier: Apache-2.0
"""Flower NumPyClients that do the local work, and the handlers around them."""
