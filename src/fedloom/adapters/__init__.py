# SPDX-License-Identifier: Apache-2.0
"""What is hung on a frozen LLM, and how it is hung and taken off."""
