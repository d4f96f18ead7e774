# SPDX-License-Identifier: Apache-2.0
"""``python -m fedloom.simulations`` is the ``fedloom`` command."""

from fedloom.simulations.cli import main

if __name__ == "__main__":
    main()
