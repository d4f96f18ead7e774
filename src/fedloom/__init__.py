# SPDX-License-Identifier: Apache-2.0
"""Federated adaptation of frozen language models on Flower: FedNL, FedRefine, FAAST."""

__version__ = "0.1.0"
