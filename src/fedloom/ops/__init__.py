# SPDX-License-Identifier: Apache-2.0
"""Tensor functions, each with its naive twin."""

from fedloom.ops.delta_rule import RULES, delta_rule, delta_step, naive_delta_rule

__all__ = ["RULES", "delta_rule", "delta_step", "naive_delta_rule"]
