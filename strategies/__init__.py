# SPDX-License-Identifier: Apache-2.0
"""Flower strategies: sampling, checks, ledger and folding; no torch."""
