# SPDX-License-Identifier: Apache-2.0
"""Tensor functions, each with its naive twin."""
