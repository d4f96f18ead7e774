# SPDX-License-Identifier: Apache-2.0
"""Fast weights on language models: compiled from text, validated, and asked."""
