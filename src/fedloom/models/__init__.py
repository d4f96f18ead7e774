# SPDX-License-Identifier: Apache-2.0
"""Frozen base models by one string, loaded once a process."""
